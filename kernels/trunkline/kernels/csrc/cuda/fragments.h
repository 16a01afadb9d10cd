// Where each lane of a warp finds and holds the parts of a matrix product: pure index functions, no hardware.
//
// mma.sync m16n8k16 computes C[16 x 8] += A[16 x 16] * B[16 x 8]. With g = lane / 4 and t = lane % 4 a lane holds
//
//      A   a0: row g,   k 2t, 2t+1       a1: row g+8, k 2t, 2t+1
//          a2: row g,   k 2t+8, 2t+9     a3: row g+8, k 2t+8, 2t+9
//      B   b0: k 2t, 2t+1, column g      b1: k 2t+8, 2t+9, column g
//      C   c0, c1: row g, columns 2t, 2t+1       c2, c3: row g+8, columns 2t, 2t+1
//
// One load_matrices brings four 8 x 8 matrices; lane i names row i % 8 of matrix i / 8. The functions below give
// the row and the column (of the tile in shared memory) that a lane has to name.
//
// Rows in shared memory are `row_stride(width)` elements apart: 16 bytes more than they are long. All widths are
// multiples of 16 elements, so that a row starts an odd number of 16-byte units after the one before, and the
// eight rows of a matrix fall on eight different groups of four banks: no conflicts, for every head size alike.
#pragma once

#if defined(__CUDACC__)
#define TRUNKLINE_FRAGMENT __host__ __device__ constexpr
#else
#define TRUNKLINE_FRAGMENT constexpr
#endif

namespace trunkline::fragment {

TRUNKLINE_FRAGMENT int row_stride(int width) { return width + 8; }

// A (queries, weights), row-major: matrices (rows 0-7, k 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15) = a0..a3.
TRUNKLINE_FRAGMENT int a_row(int lane) { return lane & 15; }
TRUNKLINE_FRAGMENT int a_column(int lane) { return (lane >> 4) * 8; }

// B of scores, for two column tiles and one k step: columns are tokens, k is the head dimension, and K lies
// row-major by token, so no transposition. Matrices (tokens 0-7, k 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15):
// b0, b1 of tokens 0-7, then b0, b1 of tokens 8-15.
TRUNKLINE_FRAGMENT int key_pair_token(int lane) { return (lane & 7) + ((lane >> 4) << 3); }
TRUNKLINE_FRAGMENT int key_pair_column(int lane) { return ((lane >> 3) & 1) * 8; }

// The same for one column tile and two k steps: b0, b1 of the first, b0, b1 of the second.
TRUNKLINE_FRAGMENT int key_single_token(int lane) { return lane & 7; }
TRUNKLINE_FRAGMENT int key_single_column(int lane) { return (lane >> 3) * 8; }

// B of outputs, for one column tile and two k steps: k are tokens, columns the head dimension. V lies row-major by
// token, so the matrices (8 tokens x 8 columns) are transposed as they are loaded: lane i names token i.
TRUNKLINE_FRAGMENT int value_token(int lane) { return lane; }

// Tiles in 8 bits lie in rows of an odd number of words, so ldmatrix cannot read them; lanes read words. Which token or
// column stands where in a product is chosen so that 32 lanes meet 32 banks, with keys (rows by g, words by t) as with
// values (rows by t, words by g). Column n of tile j of the scores is this token,
TRUNKLINE_FRAGMENT int byte_token(int j, int n) { return j / 4 * 32 + n * 4 + j % 4; }
// k 2t, 2t+1, 2t+8, 2t+9 of 16 of the head dimension are these four columns, the same of queries and keys,
TRUNKLINE_FRAGMENT int byte_quad(int lane) { return (lane & 3) * 4; }
// and column n of the c-th of `tiles` tiles of the output is column tiles * n + c of theirs.
TRUNKLINE_FRAGMENT int byte_column(int tiles, int n) { return tiles * n; }

// C: the row of c0 and c1 (that of c2 and c3 is 8 further), the column of c0 and c2 (c1 and c3: the next).
TRUNKLINE_FRAGMENT int c_row(int lane) { return lane >> 2; }
TRUNKLINE_FRAGMENT int c_column(int lane) { return (lane & 3) * 2; }

}  // namespace trunkline::fragment
