// The operators of this library; each one's file describes its inputs and outputs.
#pragma once

#include "onnxruntime.h"

extern const OrtCustomOp kLinearOp, kLinearsOp, kLinear4Op, kLinear8Op;
extern const OrtCustomOp kNormLinearOp, kNormLinearsOp, kNormLinear4Op, kNormLinear8Op;
extern const OrtCustomOp kAttentionOp, kInt8AttentionOp, kInt16AttentionOp, kMaskedAttentionOp;
extern const OrtCustomOp kPackOp, kUnpackOp, kTokenPositionsOp, kPackedRowsOp, kFirstRowsOp;
extern const OrtCustomOp kCausalConvOp, kLinearAttentionOp;
extern const OrtCustomOp kAdaptOp, kAdaptLookupOp, kAdapterRowsOp;
extern const OrtCustomOp kAddNormOp, kLogitsSummaryOp;
