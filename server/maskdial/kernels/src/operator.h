// The table of functions by which ONNX Runtime makes and runs an operator.
#pragma once

#include "onnxruntime.h"
#include "tensor.h"

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
    return guarded(op->api, [&] { op->kernel.compute(context); });
  }
};

// What all operators have alike; the caller adds the name, and the inputs and outputs.
template <typename Kernel>
OrtCustomOp operator_table() {
  OrtCustomOp table{};
  table.version = kOperatorVersion;
  table.GetExecutionProviderType = [](const OrtCustomOp*) { return "CPUExecutionProvider"; };
  table.GetOutputType = [](const OrtCustomOp*, size_t) { return kFloat; };
  table.KernelDestroy = [](void* made) { delete static_cast<Operator<Kernel>*>(made); };
  table.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return kRequired; };
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
