// Products of rows and weights in blocks, by the form of a panel and the number of rows.
//
// Included by processor.cpp only: see vectors.h.
#pragma once

#include "unpacked_blocks.h"

namespace {

// The rows are not copied from one tile to the next: a load of two pointers that were stored one by
// one waits until all stores before them, which are the products', have reached the cache.
template <BlockWeights kWeights, BlockNumbers kNumbers>
void multiply_all_blocks(const BlockRows& rows, size_t num_rows, const BlockPanel& panel,
                         const Result& result) {
#ifdef UNPACKS_BLOCKS
  if constexpr (chunk_size_of(kWeights) == kHalfChunk) {
    if (num_rows >= kLeastUnpackedRows) {
      return multiply_unpacked<kWeights, kNumbers>(rows, num_rows, panel, result);
    }
  }
#endif
  const size_t tile_rows = rows_of_tiles(num_rows, kTileRows<kPanel4>);
  for (size_t row = 0; row < num_rows; row += tile_rows) {
    const size_t some = num_rows - row < tile_rows ? num_rows - row : tile_rows;
    multiply_block_rows<kWeights, kNumbers, kTileRows<kPanel4>>(rows, row, some, panel,
                                                                result.from(row));
  }
}

template <BlockWeights kWeights, BlockNumbers kFirst, BlockNumbers... kOthers>
void multiply_blocks_of(const BlockRows& rows, size_t num_rows, const BlockPanel& panel,
                        const Result& result) {
  if constexpr (sizeof...(kOthers) > 0) {
    if (panel.form.numbers != kFirst) {
      return multiply_blocks_of<kWeights, kOthers...>(rows, num_rows, panel, result);
    }
  }
  multiply_all_blocks<kWeights, kFirst>(rows, num_rows, panel, result);
}

// The forms that BlockMatrix (linear_blocks.cpp) chooses from.
void multiply_blocks(const BlockRows& rows, size_t num_rows, const BlockPanel& panel,
                     const Result& result) {
  using Numbers = BlockNumbers;
  switch (panel.form.weights) {
    case BlockWeights::kNibbles:
      return multiply_blocks_of<BlockWeights::kNibbles, Numbers::kHalfZero, Numbers::kByteMinimum,
                                Numbers::kHalfMinimum, Numbers::kFloatMinimum, Numbers::kFloatZero>(
          rows, num_rows, panel, result);
    case BlockWeights::kFives:
      return multiply_blocks_of<BlockWeights::kFives, Numbers::kHalf, Numbers::kByteMinimum,
                                Numbers::kHalfMinimum>(rows, num_rows, panel, result);
    case BlockWeights::kSixes:
      return multiply_blocks_of<BlockWeights::kSixes, Numbers::kByte, Numbers::kByteMinimum>(
          rows, num_rows, panel, result);
    case BlockWeights::kBytes:
      return multiply_blocks_of<BlockWeights::kBytes, Numbers::kHalf, Numbers::kByte,
                                Numbers::kFloatMinimum, Numbers::kFloat>(rows, num_rows, panel, result);
    case BlockWeights::kHalfBytes:
      return multiply_blocks_of<BlockWeights::kHalfBytes, Numbers::kHalf, Numbers::kFloatMinimum,
                                Numbers::kFloat>(rows, num_rows, panel, result);
  }
}

}  // namespace
