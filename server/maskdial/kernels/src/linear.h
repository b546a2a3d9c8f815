// Linear: rows quantized to int8, times weights int8, scaled back to float.
#pragma once

#include "onnxruntime.h"

extern const OrtCustomOp kLinearOp;
