// Draws a token from a row of scores, as candidates.py does.
#pragma once

#include "processor.h"

// Attributes of SamplingParams, the maximum score, which is finite, and the share, in [0, 1), of the
// candidates' weight before the token drawn.
struct Drawing {
  float max_score, temperature;
  size_t top_k;
  double top_p;
  float min_p;
  double share;
};

// The index of the token. Scores of -inf are never drawn. There is room for `size` weights, and twice
// as many indices.
int64_t draw(const Processor& processor, const float* scores, size_t size, const Drawing& how,
             float* weights, int64_t* room);
