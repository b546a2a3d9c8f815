// Tensors, attributes and errors of ONNX Runtime.
#pragma once

#include <algorithm>
#include <exception>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

#include "onnxruntime.h"
#include "processor.h"

// An error of an operator; ONNX Runtime reports the message.
class Error : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Inputs that do not fit their operator, which adds its name.
struct Mismatch {
  const char* what;
};

inline void require(bool fits, const char* what) {
  if (!fits) throw Mismatch{what};
}

// An error that ONNX Runtime reported itself.
struct Failed {
  OrtStatus* status;
};

inline void check(const OrtApi&, OrtStatus* status) {
  if (status != nullptr) throw Failed{status};
}

// Exceptions must not leave the library.
template <typename Body>
OrtStatus* guarded(const OrtApi& api, Body body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const Failed& failed) {
    return failed.status;
  } catch (const Error& error) {
    return api.CreateStatus(kInvalidArgument, error.what());
  } catch (const std::exception& error) {
    return api.CreateStatus(kFail, error.what());
  }
}

inline const Processor* required_processor() {
  const Processor* processor = choose_processor();
  if (processor == nullptr) {
    throw Error("MASKDIAL_KERNELS_ISA names instructions that this processor does not have");
  }
  return processor;
}

template <typename Element>
constexpr ElementType element_type = kFloat;
template <>
inline constexpr ElementType element_type<int8_t> = kInt8;
template <>
inline constexpr ElementType element_type<int16_t> = kInt16;

// A view of dimensions.
class Dims {
 public:
  Dims() = default;
  Dims(const int64_t* dims, size_t count) : dims_(dims), count_(count) {}
  Dims(const std::vector<int64_t>& dims) : Dims(dims.data(), dims.size()) {}
  // For a parameter: the list does not live longer than the call.
  Dims(std::initializer_list<int64_t> dims) : Dims(dims.begin(), dims.size()) {}

  const int64_t* data() const { return dims_; }
  size_t size() const { return count_; }
  bool empty() const { return count_ == 0; }
  const int64_t* begin() const { return dims_; }
  const int64_t* end() const { return dims_ + count_; }
  int64_t operator[](size_t index) const { return dims_[index]; }
  int64_t back() const { return dims_[count_ - 1]; }

  friend bool operator==(const Dims& a, const Dims& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
  }

 private:
  const int64_t* dims_ = nullptr;
  size_t count_ = 0;
};

struct Tensor {
  int type = 0;
  Dims dims{};  // of ONNX Runtime
  const void* data = nullptr;

  const float* floats() const { return static_cast<const float*>(data); }
  // Whether an optional one is there; an empty one may have no data.
  bool given() const { return data != nullptr || !dims.empty(); }

  size_t dim(size_t index) const { return static_cast<size_t>(dims[index]); }

  size_t size() const {
    size_t product = 1;
    for (int64_t dim : dims) product *= static_cast<size_t>(dim);
    return product;
  }

  static Tensor of(const OrtApi& api, const OrtValue* value) {
    Tensor tensor;
    const int64_t* dims = nullptr;
    size_t count = 0;
    check(api, api.GetTensorElementTypeAndShapeDataReference(value, &tensor.type, &dims, &count));
    tensor.dims = Dims(dims, count);
    void* data = nullptr;
    check(api, api.GetTensorMutableData(const_cast<OrtValue*>(value), &data));
    tensor.data = data;
    return tensor;
  }

  // An optional one that is missing has no data.
  static Tensor input(const OrtApi& api, const OrtKernelContext* context, size_t index,
                      bool optional = false) {
    const OrtValue* value = nullptr;
    if (optional) {
      size_t count = 0;
      check(api, api.KernelContext_GetInputCount(context, &count));
      if (index >= count) return {};
    }
    check(api, api.KernelContext_GetInput(context, index, &value));
    if (value == nullptr && optional) return {};
    if (value == nullptr) throw Error("an input is missing");
    return of(api, value);
  }

  template <typename Element = float>
  static Element* output(const OrtApi& api, OrtKernelContext* context, size_t index,
                         const Dims& dims) {
    OrtValue* value = nullptr;
    void* data = nullptr;
    check(api, api.KernelContext_GetOutput(context, index, dims.data(), dims.size(), &value));
    check(api, api.GetTensorMutableData(value, &data));
    return static_cast<Element*>(data);
  }

  static bool is_constant(const OrtApi& api, const OrtKernelInfo* info, size_t index) {
    int is_constant = 0;
    const OrtValue* value = nullptr;
    check(api, api.KernelInfoGetConstantInput_tensor(info, index, &is_constant, &value));
    return is_constant != 0 && value != nullptr;
  }

  // A constant input. An optional one that is missing has no data.
  static Tensor constant(const OrtApi& api, const OrtKernelInfo* info, size_t index,
                         ElementType type, bool optional = false) {
    int is_constant = 0;
    const OrtValue* value = nullptr;
    OrtStatus* status = api.KernelInfoGetConstantInput_tensor(info, index, &is_constant, &value);
    check(api, status);
    if (is_constant == 0 || value == nullptr) {
      if (optional) return {};
      throw Error("weights must be constant");
    }
    Tensor tensor = of(api, value);
    if (tensor.type != type) throw Error("a weight has the wrong type");
    return tensor;
  }
};

inline float float_attribute(const OrtApi& api, const OrtKernelInfo* info, const char* name) {
  float value = 0;
  check(api, api.KernelInfoGetAttribute_float(info, name, &value));
  return value;
}

inline int64_t int_attribute(const OrtApi& api, const OrtKernelInfo* info, const char* name) {
  int64_t value = 0;
  check(api, api.KernelInfoGetAttribute_int64(info, name, &value));
  return value;
}

inline std::string string_attribute(const OrtApi& api, const OrtKernelInfo* info, const char* name) {
  size_t size = 0;
  check(api, api.KernelInfoGetAttribute_string(info, name, nullptr, &size));
  std::string value(size, '\0');
  check(api, api.KernelInfoGetAttribute_string(info, name, value.data(), &size));
  value.resize(size - 1);
  return value;
}
