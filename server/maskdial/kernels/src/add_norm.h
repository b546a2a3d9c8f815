// AddNorm: the layer norm of a sum.
#pragma once

#include "onnxruntime.h"

extern const OrtCustomOp kAddNormOp;
