// CausalAttention over a KV cache of float, and the same over one of int8 and one of int16.
#pragma once

#include "onnxruntime.h"

extern const OrtCustomOp kAttentionOp;
extern const OrtCustomOp kInt8AttentionOp;
extern const OrtCustomOp kInt16AttentionOp;
