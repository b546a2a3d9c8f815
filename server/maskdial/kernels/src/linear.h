// Linear and Linear4: rows quantized to int8, times weights of 8 or 4 bits, scaled back to float.
#pragma once

#include "onnxruntime.h"

extern const OrtCustomOp kLinearOp, kLinearsOp, kLinear4Op, kNormLinearOp, kNormLinearsOp,
    kNormLinear4Op;
