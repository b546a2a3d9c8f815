// The library's exported functions: for ONNX Runtime, the sampler, and tests.
#include "adapters.h"
#include "drawing.h"
#include "operators.h"
#include "tensor.h"
#include "trace.h"
#include "logits.h"

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
                                 size_t size, int64_t* best, float* max_logits, double* sum_exp) {
  std::vector<LogitsSummary> segments(num_segments(size));
  for (size_t row = 0; row < num_rows; ++row, scores += size) {
    for (size_t i = 0; i < segments.size(); ++i) {
      segments[i] = summarize_segment(*processor, scores, size, i);
    }
    const LogitsSummary summary = merge_segments(segments.data(), segments.size());
    best[row] = summary.best;
    max_logits[row] = summary.max_logit;
    sum_exp[row] = summary.sum_exp;
  }
}

EXPORTED size_t maskdial_find_greatest(const Processor* processor, const float* scores, size_t size,
                                       size_t k, int64_t* out) {
  return find_greatest(*processor, scores, size, k, out);
}

EXPORTED int64_t maskdial_draw(const Processor* processor, const float* scores, size_t size,
                               float max_score, float temperature, size_t top_k, double top_p,
                               float min_p, double share, float* weights, int64_t* room) {
  const Drawing how = {max_score, temperature, top_k, top_p, min_p, share};
  return draw(*processor, scores, size, how, weights, room);
}

// Reads `count` blocks of a type of GGUF's quantized tensors: as integers, scales and minima, or as floats.
// Returns how many bytes that were; 0 for a type that is not known.
EXPORTED size_t maskdial_unpack(const Processor* processor, uint32_t number, const uint8_t* stored, size_t count,
                                uint8_t* values, float* scales, float* minima) {
  const StoredType* type = processor->find_stored_type(number);
  if (type == nullptr) return 0;
  if (count != 0) type->unpack(stored, count, {values, scales, minima});
  return count * type->num_bytes;
}

EXPORTED size_t maskdial_restore(const Processor* processor, uint32_t number, const uint8_t* stored, size_t count,
                                 float* out) {
  const StoredType* type = processor->find_stored_type(number);
  if (type == nullptr) return 0;
  if (count != 0) type->restore(stored, count, out);
  return count * type->num_bytes;
}

// An adapter without matrices, to be released when no pass can use it any more.
EXPORTED Adapter* maskdial_new_adapter() { return new Adapter; }

EXPORTED void maskdial_release_adapter(Adapter* adapter) { delete adapter; }

EXPORTED size_t maskdial_adapt(Adapter* adapter, const char* product, const void* a, const void* b,
                               size_t rank, size_t num_inputs, size_t num_outputs, size_t first,
                               int halves) {
  return adapter->add(product, a, b, rank, num_inputs, num_outputs, first, halves != 0);
}

// The constants that Python repeats, in this order: kChunk, kLanes, kMaxProducts of Linears, and the
// elements before a head in caches of int8 and int16. A test compares them.
EXPORTED void maskdial_constants(size_t* out) {
  for (size_t constant : {kChunk, kLanes, kMaxProducts, sizeof(Int8Header), kInt16Header}) {
    *out++ = constant;
  }
}

// Begins to count what operators do, or ends it.
EXPORTED void maskdial_trace(int on) {
  Trace& trace = Trace::instance();
  if (on != 0) trace.traced.clear();
  trace.on = on != 0;
}

// An operator of those counted: its name, and its tasks in a call, barriers, calls and nanoseconds. Null after
// the last one.
EXPORTED const char* maskdial_traced(size_t index, uint64_t* out) {
  const std::vector<Traced>& traced = Trace::instance().traced;
  if (index >= traced.size()) return nullptr;
  const Traced& its = traced[index];
  for (uint64_t number : {its.num_tasks, its.num_barriers, its.num_calls, its.nanoseconds}) {
    *out++ = number;
  }
  return its.name;
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
           {&kLinearOp, &kLinearsOp, &kLinear4Op, &kLinear8Op, &kNormLinearOp, &kNormLinearsOp, &kNormLinear4Op, &kNormLinear8Op,
            &kAttentionOp, &kInt8AttentionOp, &kInt16AttentionOp, &kMaskedAttentionOp, &kPackOp,
            &kUnpackOp, &kTokenPositionsOp, &kPackedRowsOp, &kFirstRowsOp, &kAddNormOp, &kAdaptOp,
            &kAdaptLookupOp, &kAdapterRowsOp,
            &kCausalConvOp, &kLinearAttentionOp, &kLogitsSummaryOp}) {
        check(*api, api->CustomOpDomain_Add(created, op));
      }
      return created;
    }();
    check(*api, api->AddCustomOpDomain(options, domain));
  });
}
