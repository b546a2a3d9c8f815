// The part of ONNX Runtime's C interface that these kernels use.
//
// OrtApi is a table of functions whose order never changes; later versions append to it
// (onnxruntime_c_api.h, "OrtApi"). So the functions are called by their place in the table.
#pragma once

#include <cstddef>
#include <cstdint>

struct OrtStatus;
struct OrtValue;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtShapeInferContext;
struct OrtKeyValuePairs;
struct OrtCustomOp;

enum ElementType : int {
  kAnyType = 0,
  kFloat = 1,
  kUint8 = 2,
  kInt8 = 3,
  kInt16 = 5,
  kInt32 = 6,
  kInt64 = 7,
  kDouble = 11,
};
enum Characteristic : int { kRequired = 0, kOptional = 1 };
enum ErrorCode : int { kFail = 1, kInvalidArgument = 2 };

// The oldest interface that has every function below: ONNX Runtime 1.24.
constexpr uint32_t kApiVersion = 24;
// And the version of the description of an operator that is filled in here.
constexpr uint32_t kOperatorVersion = 17;

class OrtApi {
 public:
  OrtStatus* CreateStatus(ErrorCode code, const char* message) const {
    return call<0, OrtStatus*>(static_cast<int>(code), message);
  }
  OrtStatus* CreateCustomOpDomain(const char* name, OrtCustomOpDomain** domain) const {
    return call<26, OrtStatus*>(name, domain);
  }
  OrtStatus* CustomOpDomain_Add(OrtCustomOpDomain* domain, const OrtCustomOp* op) const {
    return call<27, OrtStatus*>(domain, op);
  }
  OrtStatus* AddCustomOpDomain(OrtSessionOptions* options, OrtCustomOpDomain* domain) const {
    return call<28, OrtStatus*>(options, domain);
  }
  OrtStatus* GetTensorMutableData(OrtValue* value, void** data) const {
    return call<51, OrtStatus*>(value, data);
  }
  OrtStatus* KernelInfoGetAttribute_float(const OrtKernelInfo* info, const char* name,
                                          float* value) const {
    return call<85, OrtStatus*>(info, name, value);
  }
  OrtStatus* KernelInfoGetAttribute_int64(const OrtKernelInfo* info, const char* name,
                                          int64_t* value) const {
    return call<86, OrtStatus*>(info, name, value);
  }
  // Without a place to write to, the size only, which includes the end.
  OrtStatus* KernelInfoGetAttribute_string(const OrtKernelInfo* info, const char* name, char* value,
                                           size_t* size) const {
    return call<87, OrtStatus*>(info, name, value, size);
  }
  OrtStatus* KernelContext_GetInputCount(const OrtKernelContext* context, size_t* count) const {
    return call<88, OrtStatus*>(context, count);
  }
  OrtStatus* KernelContext_GetInput(const OrtKernelContext* context, size_t index,
                                    const OrtValue** value) const {
    return call<90, OrtStatus*>(context, index, value);
  }
  OrtStatus* KernelContext_GetOutput(OrtKernelContext* context, size_t index, const int64_t* dims,
                                     size_t count, OrtValue** value) const {
    return call<91, OrtStatus*>(context, index, dims, count, value);
  }
  OrtStatus* KernelInfo_GetInputCount(const OrtKernelInfo* info, size_t* count) const {
    return call<230, OrtStatus*>(info, count);
  }
  // Null for an input that is missing or not constant.
  OrtStatus* KernelInfoGetConstantInput_tensor(const OrtKernelInfo* info, size_t index,
                                               int* is_constant, const OrtValue** value) const {
    return call<249, OrtStatus*>(info, index, is_constant, value);
  }
  // Calls function(data, i) for each i below total, on the session's own threads.
  OrtStatus* KernelContext_ParallelFor(const OrtKernelContext* context,
                                       void (*function)(void*, size_t), size_t total,
                                       size_t num_batches, void* data) const {
    return call<274, OrtStatus*>(context, function, total, num_batches, data);
  }
  const char* GetKeyValue(const OrtKeyValuePairs* pairs, const char* key) const {
    return call<297, const char*>(pairs, key);
  }
  void ReleaseKeyValuePairs(OrtKeyValuePairs* pairs) const { call<300, void>(pairs); }
  // A copy of the session's configuration.
  OrtStatus* KernelInfo_GetConfigEntries(const OrtKernelInfo* info, OrtKeyValuePairs** pairs) const {
    return call<391, OrtStatus*>(info, pairs);
  }
  // The dimensions are the value's own.
  OrtStatus* GetTensorElementTypeAndShapeDataReference(const OrtValue* value, int* type,
                                                       const int64_t** dims, size_t* count) const {
    return call<414, OrtStatus*>(value, type, dims, count);
  }

 private:
  template <size_t Place, typename Result, typename... Arguments>
  Result call(Arguments... arguments) const {
    return reinterpret_cast<Result (*)(Arguments...)>(table_[Place])(arguments...);
  }

  void* table_[415];
};

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

// Version kOperatorVersion of the description of an operator. A null function means the default.
struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  ElementType (*GetInputType)(const OrtCustomOp*, size_t index);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  ElementType (*GetOutputType)(const OrtCustomOp*, size_t index);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void* kernel, OrtKernelContext*);
  void (*KernelDestroy)(void* kernel);
  Characteristic (*GetInputCharacteristic)(const OrtCustomOp*, size_t index);
  Characteristic (*GetOutputCharacteristic)(const OrtCustomOp*, size_t index);
  int (*GetInputMemoryType)(const OrtCustomOp*, size_t index);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*,
                               void** kernel);
  OrtStatus* (*KernelComputeV2)(void* kernel, OrtKernelContext*);
  OrtStatus* (*InferOutputShape)(const OrtCustomOp*, OrtShapeInferContext*);
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
};
