// The packed form of block-quantised weights, as kernels read it. linear/device_format.rs describes
// and writes it.
#pragma once

#include "common.cuh"

namespace {

// Rows and columns of a tile; columns that share a header.
constexpr uint32_t TILE_ROWS = 32, TILE_COLUMNS = 64, HEADER_COLUMNS = 256;
// 128 in bf16. The integers up to 255 follow it by their bits, so that a code's bits are added to
// those of 128 to make the number 128 + code.
constexpr uint32_t ONE_128 = 0x4300, TWO_128 = ONE_128 << 16 | ONE_128;

// The numbers of a format that its kernels are given.
struct PackedFormat {
    uint32_t zero;     // the code that means zero
    uint32_t bytes;    // whether scales are bytes that multiply those of a header
    uint32_t minimum;  // whether there are minimums

    DEVICE uint32_t scale_bytes(uint32_t groups) const {
        return groups * TILE_ROWS * (bytes != 0 ? 1 : 2) * (minimum != 0 ? 2 : 1);
    }
    DEVICE uint32_t header_bytes() const {
        return bytes == 0 ? 0 : TILE_ROWS * 2 * (minimum != 0 ? 2 : 1);
    }
};

DEVICE constexpr uint32_t group_columns(uint32_t bits) { return bits == 6 ? 16 : 32; }
DEVICE constexpr uint32_t groups_of_tile(uint32_t bits) {
    return TILE_COLUMNS / group_columns(bits);
}
DEVICE constexpr uint32_t code_bytes(uint32_t bits) { return TILE_ROWS * TILE_COLUMNS * bits / 8; }

// Finds the tiles and headers of a band of 32 rows.
struct PackedBand {
    const unsigned char* begin;
    uint32_t tile_bytes, header_bytes, tiles;

    DEVICE PackedBand(
        const unsigned char* w, uint32_t band, uint32_t cols, uint32_t bits, const PackedFormat& f)
        : tile_bytes(code_bytes(bits) + f.scale_bytes(groups_of_tile(bits))),
          header_bytes(f.header_bytes()),
          tiles((cols + TILE_COLUMNS - 1) / TILE_COLUMNS) {
        uint32_t headers = (cols + HEADER_COLUMNS - 1) / HEADER_COLUMNS;
        begin = w + static_cast<size_t>(band) * (tiles * tile_bytes + headers * header_bytes);
    }
    DEVICE const unsigned char* tile(uint32_t column) const {
        return begin + static_cast<size_t>(column / TILE_COLUMNS) * tile_bytes;
    }
    DEVICE const unsigned char* header(uint32_t column) const {
        return begin + static_cast<size_t>(tiles) * tile_bytes +
               column / HEADER_COLUMNS * header_bytes;
    }
};

// The scale and the minimum of a group in each of N neighbouring rows of a tile.
template <uint32_t N>
struct GroupScales {
    float scale[N], minimum[N];

    DEVICE void load_from(const unsigned char* scales, const unsigned char* header, uint32_t groups,
        uint32_t group, uint32_t row, const PackedFormat& f) {
        if (f.bytes != 0) {
            scaled(scale, scales + group * TILE_ROWS + row, header + row * 2);
            if (f.minimum != 0)
                scaled(minimum, scales + (groups + group) * TILE_ROWS + row,
                    header + (TILE_ROWS + row) * 2);
        } else {
            halves(scale, scales + (group * TILE_ROWS + row) * 2);
            if (f.minimum != 0) halves(minimum, scales + ((groups + group) * TILE_ROWS + row) * 2);
        }
    }

  private:
    DEVICE static void halves(float (&to)[N], const unsigned char* from) {
        Vec<uint16_t, N> bits = load<uint16_t, N>(reinterpret_cast<const uint16_t*>(from));
#pragma unroll
        for (uint32_t i = 0; i < N; i++) to[i] = half_to_float(bits.at[i]);
    }
    DEVICE static void scaled(
        float (&to)[N], const unsigned char* from, const unsigned char* header) {
        halves(to, header);
        Vec<int8_t, N> factors = load<int8_t, N>(reinterpret_cast<const int8_t*>(from));
#pragma unroll
        for (uint32_t i = 0; i < N; i++) to[i] *= static_cast<float>(factors.at[i]);
    }
};

// The codes of a lane: its values of the tensor core's tiles of w. Tile i of step s has the 16
// columns from 16 s on. Lane 4 g + t has in register r of it the rows 4 g + 2 i + r % 2, columns 2
// t + 8 (r / 2) and the next one.
template <uint32_t BITS>
struct LaneCodes {
    static constexpr uint32_t CHUNKS = BITS == 8 ? 4 : 2, HIGH = BITS == 8 ? 0 : BITS - 4;

    Vec<uint32_t, 4> low[CHUNKS];
    Vec<uint32_t, HIGH == 2 ? 4 : 2> high;

    DEVICE void load_from(const unsigned char* tile) {
        const uint32_t* words = reinterpret_cast<const uint32_t*>(tile);
#pragma unroll
        for (uint32_t i = 0; i < CHUNKS; i++)
            low[i] = load<uint32_t, 4>(words + (i * WARP + lane()) * 4);
        if constexpr (HIGH > 0)
            high = load<uint32_t, 2 * HIGH>(words + CHUNKS * WARP * 4 + lane() * 2 * HIGH);
    }

    // The numbers that the codes of a tile mean, before scale and minimum. `zero` is ONE_128 and
    // the zero of the format, twice; codes of 8 bits have the zero 128.
    DEVICE void fragment(uint32_t (&a)[4], uint32_t step, uint32_t tile, uint32_t zero) const {
#pragma unroll
        for (uint32_t r = 0; r < 4; r++) {
            if constexpr (BITS == 8) {
                uint32_t codes = low[step].at[tile * 2 + r / 2] >> (r % 2 * 8);
                // The low seven bits are added to 128. Then 128 is subtracted if the code's high
                // bit is set, and 256 if it is not, which leaves the code less 128.
                a[r] = subtract_pairs(
                    (codes & 0x007f007fu) | TWO_128, (~codes & 0x00800080u) | TWO_128);
            } else {
                uint32_t codes = (low[step / 2].at[step % 2 * 2 + tile] >> (r * 4)) & 0x000f000fu;
                if constexpr (HIGH == 1)
                    codes |= ((high.at[step / 2] >> (step % 2 * 8 + tile * 4 + r)) & 0x00010001u)
                             << 4;
                if constexpr (HIGH == 2)
                    codes |= ((high.at[step] >> (tile * 8 + r * 2)) & 0x00030003u) << 4;
                a[r] = subtract_pairs(codes | TWO_128, zero);
            }
        }
    }
};

// The code at a row and a column of a tile.
DEVICE uint32_t code_at(const unsigned char* tile, uint32_t bits, uint32_t row, uint32_t column) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(tile);
    uint32_t owner = row / 4 * 4 + column % 8 / 2, half = column % 2 * 16, step = column / 16,
             i = row % 4 / 2, r = row % 2 + column % 16 / 8 * 2;
    if (bits == 8)
        return words[(step * WARP + owner) * 4 + i * 2 + r / 2] >> (half + r % 2 * 8) & 255;
    uint32_t code = words[(step / 2 * WARP + owner) * 4 + step % 2 * 2 + i] >> (half + r * 4) & 15;
    words += 2 * WARP * 4;
    if (bits == 5)
        code |= (words[owner * 2 + step / 2] >> (half + step % 2 * 8 + i * 4 + r) & 1) << 4;
    if (bits == 6) code |= (words[owner * 4 + step] >> (half + i * 8 + r * 2) & 3) << 4;
    return code;
}

// The weight at a row and a column of the matrix.
DEVICE float weight_at(const unsigned char* w, uint32_t bits, uint32_t row, uint32_t column,
    uint32_t cols, const PackedFormat& f) {
    PackedBand band(w, row / TILE_ROWS, cols, bits, f);
    const unsigned char* tile = band.tile(column);
    uint32_t inside = row % TILE_ROWS, groups = groups_of_tile(bits);
    GroupScales<1> group{};
    group.load_from(tile + code_bytes(bits), band.header(column), groups,
        column % TILE_COLUMNS / group_columns(bits), inside, f);
    int32_t code = static_cast<int32_t>(code_at(tile, bits, inside, column % TILE_COLUMNS)) -
                   static_cast<int32_t>(f.zero);
    float value = group.scale[0] * static_cast<float>(code);
    return f.minimum != 0 ? value + group.minimum[0] : value;
}

}  // namespace
