// Linear: rows quantized to int8, times weights int8, scaled back to float.
#pragma once

#include <memory>
#include <vector>

#include "onnxruntime.h"
#include "processor.h"

extern const OrtCustomOp kLinearOp;
