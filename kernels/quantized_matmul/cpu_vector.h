// Sixteen float lanes on AVX-512, AVX2 or whatever there is, for the instruction set that the
// including file is compiled for. All three give the same bits where a fused multiply-add exists.
//
// Only C headers are included and everything has internal linkage: an inline function compiled
// here for AVX-512 must never be the copy that the linker keeps for everybody.
//
// Each says how many rows and tokens fill its registers (kTileRows must divide kPanelRows), and up
// to how many tokens weights are multiplied as they are decoded (kDirectTokens): what is fastest.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include "cpu_vector_avx512.h"
#elif defined(__AVX2__)
#include "cpu_vector_avx2.h"
#else
#include "cpu_vector_portable.h"
#endif
