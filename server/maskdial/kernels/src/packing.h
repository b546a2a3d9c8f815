// Pack and Unpack: texts one after the other instead of padded ones, and back. TokenPositions: where
// in its text each token of the former is. PackedRows and FirstRows: where among them some tokens are.
#pragma once

#include "onnxruntime.h"

extern const OrtCustomOp kPackOp, kUnpackOp, kTokenPositionsOp, kPackedRowsOp, kFirstRowsOp;
