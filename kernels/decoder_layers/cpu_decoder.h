// What a stack of decoder layers on CPUs is made of: plain data, which the handler has checked.
#pragma once

#include <cstdint>

#include "../paged_attention/cpu_attention.h"
#include "../quantized_matmul/cpu_blocks.h"

namespace jaxinfer {

enum class Activation : int64_t { kSilu, kGeluTanh };

// A matrix whose rows are blocks of slots of `slot_rows`; the pieces hold neighbouring slots of
// every block, each in a format of its own.
struct Matrix {
  static constexpr int kMostPieces = 4;
  Product pieces[kMostPieces];         // without x and out
  int64_t block_rows[kMostPieces];     // of each piece, its rows in a block
  int num_pieces;
  int64_t num_rows;                    // of the whole
  const float* bias;                   // [num_rows], in the order of the whole, or null
};

// Norm weights are null where a family has no such norm.
struct Layer {
  const float* input_norm;           // [hidden]
  Matrix qkv;                        // blocks of a KV head: its queries, its key, its value
  const float *query_norm, *key_norm;  // [head_dim]
  Matrix out;
  const float* attention_norm;       // [hidden], of what attention adds
  const float* mlp_input_norm;       // [hidden]
  Matrix gate_up;                    // one block: gates, then ups
  Matrix down;
  const float* mlp_norm;             // [hidden], of what the MLP adds
  Cache cache;
  int64_t rotary, group, window;
};

// Elementwise loops, compiled for each instruction set.
struct DecoderLoops {
  // `x / sqrt(mean(x^2) + eps) * weight`.
  void (*normalize)(const float* x, const float* weight, float eps, int64_t size, float* to);
  // Rotates each pair (x[i], x[i + half]).
  void (*rotate)(const float* x, const float* cos, const float* sin, int64_t half, float* to);
  Gate* gates[2];  // by Activation
  void (*add)(const float* x, int64_t size, float* to);
};

extern const DecoderLoops decoder_loops_portable;
#if defined(__x86_64__)
extern const DecoderLoops decoder_loops_avx2;
extern const DecoderLoops decoder_loops_avx512;
#endif

}  // namespace jaxinfer
