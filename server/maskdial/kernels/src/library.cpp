// What ONNX Runtime looks for in a library of operators, and what the sampler calls.
#include "drawing.h"
#include "operators.h"
#include "tensor.h"
#include "vocabulary.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

// The name of the instruction set that kernels use when they are created now; empty if this machine
// does not have the one that MASKDIAL_KERNELS_ISA names.
EXPORTED const char* maskdial_kernels_processor() {
  const Processor* processor = choose_processor();
  return processor == nullptr ? "" : processor->name;
}

// The functions of that instruction set, for those below; null if this machine does not have it.
EXPORTED const Processor* maskdial_processor() { return choose_processor(); }

// Rows of scores [num_rows][size], at least one each.
EXPORTED void maskdial_summarize(const Processor* processor, const float* scores, size_t num_rows,
                                 size_t size, int64_t* best, float* peaks, double* totals) {
  std::vector<RowSummary> segments(num_segments(size));
  for (size_t row = 0; row < num_rows; ++row, scores += size) {
    for (size_t i = 0; i < segments.size(); ++i) {
      segments[i] = summarize_segment(*processor, scores, size, i);
    }
    const RowSummary summary = join_segments(segments.data(), segments.size());
    best[row] = summary.best;
    peaks[row] = summary.peak;
    totals[row] = summary.total;
  }
}

EXPORTED size_t maskdial_find_greatest(const Processor* processor, const float* scores, size_t size,
                                       size_t k, int64_t* out) {
  return find_greatest(*processor, scores, size, k, out);
}

EXPORTED int64_t maskdial_draw(const Processor* processor, const float* scores, size_t size, float peak,
                               float temperature, size_t top_k, double top_p, float min_p, double share,
                               float* weights, int64_t* room) {
  return draw(*processor, scores, size, {peak, temperature, top_k, top_p, min_p, share}, weights, room);
}

EXPORTED OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(kApiVersion);
  if (api == nullptr) return nullptr;  // ONNX Runtime is older; loading the graph will fail
  return guarded(*api, [&] {
    // A domain lives as long as the process: sessions keep pointers to it.
    static OrtCustomOpDomain* domain = [&] {
      OrtCustomOpDomain* created = nullptr;
      check(*api, api->CreateCustomOpDomain("maskdial", &created));
      for (const OrtCustomOp* op :
           {&kLinearOp, &kLinearsOp, &kLinear4Op, &kNormLinearOp, &kNormLinearsOp, &kNormLinear4Op,
            &kAttentionOp, &kInt8AttentionOp, &kInt16AttentionOp, &kMaskedAttentionOp, &kPackOp,
            &kUnpackOp, &kTokenPositionsOp, &kPackedRowsOp, &kFirstRowsOp, &kAddNormOp,
            &kSummaryOp}) {
        check(*api, api->CustomOpDomain_Add(created, op));
      }
      return created;
    }();
    check(*api, api->AddCustomOpDomain(options, domain));
  });
}
