// The shapes of AMX tiles, as the instruction that sets them reads them.
#pragma once

#include <stdint.h>

namespace {

struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

}  // namespace
