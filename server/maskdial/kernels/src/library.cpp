// What ONNX Runtime looks for in a library of operators.
#include "add_norm.h"
#include "attention.h"
#include "linear.h"
#include "masked_attention.h"
#include "packing.h"
#include "tensor.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

// The name of the instruction set that kernels use when they are created now; empty if this machine
// does not have the one that MASKDIAL_KERNELS_ISA names.
EXPORTED const char* maskdial_kernels_processor() {
  const Processor* processor = choose_processor();
  return processor == nullptr ? "" : processor->name;
}

EXPORTED OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(kApiVersion);
  if (api == nullptr) return nullptr;  // ONNX Runtime is older; loading the graph will fail
  return guarded(*api, [&] {
    // A domain lives as long as the process: sessions keep pointers to it.
    static OrtCustomOpDomain* domain = [&] {
      OrtCustomOpDomain* created = nullptr;
      check(*api, api->CreateCustomOpDomain("maskdial", &created));
      check(*api, api->CustomOpDomain_Add(created, &kLinearOp));
      check(*api, api->CustomOpDomain_Add(created, &kLinearsOp));
      check(*api, api->CustomOpDomain_Add(created, &kLinear4Op));
      check(*api, api->CustomOpDomain_Add(created, &kAttentionOp));
      check(*api, api->CustomOpDomain_Add(created, &kInt8AttentionOp));
      check(*api, api->CustomOpDomain_Add(created, &kMaskedAttentionOp));
      check(*api, api->CustomOpDomain_Add(created, &kPackOp));
      check(*api, api->CustomOpDomain_Add(created, &kUnpackOp));
      check(*api, api->CustomOpDomain_Add(created, &kTokenPositionsOp));
      check(*api, api->CustomOpDomain_Add(created, &kAddNormOp));
      return created;
    }();
    check(*api, api->AddCustomOpDomain(options, domain));
  });
}
