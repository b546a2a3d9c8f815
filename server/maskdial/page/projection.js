/** Principal components: vectors on a plane. */

const ROUNDS = 60;

/**
 * The coordinates of vectors along the two directions in which they differ most.
 *
 * Works on the matrix of inner products, which is as small as there are vectors.
 *
 * @param {number[][]} vectors
 * @returns {[number, number][]}
 */
export function planar(vectors) {
  const mean = vectors[0].map((_, index) => average(vectors.map((vector) => vector[index])));
  const centered = vectors.map((vector) => vector.map((value, index) => value - mean[index]));
  const gram = centered.map((one) => centered.map((other) => dot(one, other)));
  const [first, firstSize] = leading(gram);
  const rest = gram.map((row, i) => row.map((value, j) => value - firstSize * first[i] * first[j]));
  const [second, secondSize] = leading(rest);
  const [wide, high] = [Math.sqrt(Math.max(firstSize, 0)), Math.sqrt(Math.max(secondSize, 0))];
  return vectors.map((_, index) => [first[index] * wide, second[index] * high]);
}

/** The eigenvector with the largest eigenvalue, by power iteration from a fixed start. */
function leading(matrix) {
  let vector = unit(matrix.map((_, index) => Math.sin(index + 1)));
  for (let round = 0; round < ROUNDS; round++) vector = unit(matrix.map((row) => dot(row, vector)));
  return [
    vector,
    dot(
      vector,
      matrix.map((row) => dot(row, vector)),
    ),
  ];
}

function unit(vector) {
  const length = Math.sqrt(dot(vector, vector));
  return length > 1e-12 ? vector.map((value) => value / length) : vector.map(() => 0);
}

function dot(one, other) {
  return one.reduce((sum, value, index) => sum + value * other[index], 0);
}

function average(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}
