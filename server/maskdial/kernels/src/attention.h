// CausalAttention over a KV cache of float, and the same over one of int8.
#pragma once

#include "onnxruntime.h"

extern const OrtCustomOp kAttentionOp;
extern const OrtCustomOp kInt8AttentionOp;
