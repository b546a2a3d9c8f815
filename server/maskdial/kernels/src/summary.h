// Summary: of rows of logits, what greedy decoding and log-probabilities need.
#pragma once

#include "onnxruntime.h"

extern const OrtCustomOp kSummaryOp;
