// MaskedAttention: every token of a text attends to all of them.
#pragma once

#include "onnxruntime.h"

extern const OrtCustomOp kMaskedAttentionOp;
