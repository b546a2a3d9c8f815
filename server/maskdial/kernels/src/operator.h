// The table of functions by which ONNX Runtime makes and runs an operator.
#pragma once

#include <cassert>
#include <string>

#include "onnxruntime.h"
#include "tensor.h"
#include "threads.h"

// An input or an output of an operator.
struct Value {
  ElementType type = kFloat;
  Characteristic characteristic = kRequired;

  constexpr Value() = default;
  constexpr Value(ElementType element, Characteristic need = kRequired)
      : type(element), characteristic(need) {}
};

// The inputs or the outputs of an operator, in order.
class Values {
 public:
  constexpr Values() = default;
  constexpr Values(std::initializer_list<Value> values) {
    for (const Value& value : values) add(value);
  }

  constexpr void add(Value value) {
    assert(count_ < kMaxCount);
    values_[count_++] = value;
  }
  constexpr size_t size() const { return count_; }
  constexpr const Value& operator[](size_t index) const { return values_[index]; }

 private:
  static constexpr size_t kMaxCount = 16;

  Value values_[kMaxCount]{};
  size_t count_ = 0;
};

constexpr Value optional(ElementType type) { return {type, kOptional}; }

// An operator's name, inputs and outputs, as graphs have them.
struct Signature {
  const char* name;
  Values inputs, outputs;
};

template <typename Kernel>
struct Operator {
  const OrtApi& api;
  Kernel kernel;

  static OrtStatus* create(const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info,
                           void** made) {
    return guarded(*api, [&] { *made = new Operator{*api, Kernel(*api, info)}; });
  }

  static OrtStatus* compute(void* made, OrtKernelContext* context) {
    auto* op = static_cast<Operator*>(made);
    return guarded(op->api, [&] {
      try {
        if (Trace& trace = Trace::instance(); trace.on) {
          const auto since = Trace::Clock::now();
          op->kernel.compute(context);
          trace.add(Kernel::kSignature.name, since);
        } else {
          op->kernel.compute(context);
        }
      } catch (const Mismatch& mismatch) {
        throw Error(std::string("inputs of ") + Kernel::kSignature.name +
                    " do not fit: " + mismatch.what);
      }
    });
  }
};

// The table of an operator, whose class has a constant `kSignature`.
template <typename Kernel>
constexpr OrtCustomOp operator_table() {
  OrtCustomOp table{};
  table.version = kOperatorVersion;
  table.GetName = [](const OrtCustomOp*) { return Kernel::kSignature.name; };
  table.GetExecutionProviderType = [](const OrtCustomOp*) { return "CPUExecutionProvider"; };
  table.GetInputType = [](const OrtCustomOp*, size_t i) { return Kernel::kSignature.inputs[i].type; };
  table.GetInputTypeCount = [](const OrtCustomOp*) { return Kernel::kSignature.inputs.size(); };
  table.GetOutputType = [](const OrtCustomOp*, size_t i) {
    return Kernel::kSignature.outputs[i].type;
  };
  table.GetOutputTypeCount = [](const OrtCustomOp*) { return Kernel::kSignature.outputs.size(); };
  table.KernelDestroy = [](void* made) { delete static_cast<Operator<Kernel>*>(made); };
  table.GetInputCharacteristic = [](const OrtCustomOp*, size_t i) {
    return Kernel::kSignature.inputs[i].characteristic;
  };
  table.GetOutputCharacteristic = [](const OrtCustomOp*, size_t i) {
    return Kernel::kSignature.outputs[i].characteristic;
  };
  table.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return 0; };
  table.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
  table.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 1; };
  table.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
  table.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 1; };
  table.CreateKernelV2 = Operator<Kernel>::create;
  table.KernelComputeV2 = Operator<Kernel>::compute;
  table.GetStartVersion = [](const OrtCustomOp*) { return 1; };
  table.GetEndVersion = [](const OrtCustomOp*) { return 0x7fffffff; };
  return table;
}
