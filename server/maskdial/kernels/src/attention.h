// CausalAttention over a KV cache of float.
#pragma once

#include "onnxruntime.h"

extern const OrtCustomOp kAttentionOp;
