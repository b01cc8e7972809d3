// The packed form of block-quantised weights, as kernels read it. linear/device_format.rs describes
// and writes it.
#pragma once

#include "common.cuh"

namespace {

// Rows and columns of a tile.
constexpr uint32_t TILE_ROWS = 32, TILE_COLUMNS = 64;
// 128 in bf16. The integers up to 255 follow it by their bits, so that a code's bits are added to
// those of 128 to make the number 128 + code.
constexpr uint32_t ONE_128 = 0x4300, TWO_128 = ONE_128 << 16 | ONE_128;

// The forms of scales: an f16 for each group; a byte for each group, by which an f16 of the header
// is multiplied; a power of two for each group, by its exponent; an f16 in the header, in units of
// 2^-12, and beside integers the code that means zero.
constexpr uint32_t HALVES = 0, BYTES = 1, EXPONENTS = 2, HEADERS = 3;
constexpr float HEADER_UNIT = 1.0f / 4096.0f;

// The numbers of a format that its kernels are given.
struct PackedFormat {
    uint32_t zero;      // the integer that means zero, where it is the same for all groups
    uint32_t scales;    // the form of scales
    uint32_t minimum;   // whether there are minimums
    uint32_t columns;   // columns that share a scale of a header: 32, 64, 128
    uint32_t exponent;  // the exponent's bits of codes that are floats; 0: codes are integers

    DEVICE bool has_zeros() const { return scales == HEADERS && exponent == 0; }
    DEVICE uint32_t scale_bytes(uint32_t groups) const {
        if (scales == HEADERS) return 0;
        return groups * TILE_ROWS * (scales == HALVES ? 2 : 1) * (minimum != 0 ? 2 : 1);
    }
    // The columns of a header are a power of two.
    DEVICE uint32_t header_shift() const { return scales != HEADERS ? 8 : columns == 128 ? 7 : 6; }
    // Bytes of the scales, and of the zeros, of columns that share a scale of a header.
    DEVICE uint32_t group_bytes(uint32_t bits) const {
        return TILE_ROWS * 2 + (has_zeros() ? TILE_ROWS * bits / 8 : 0);
    }
    DEVICE uint32_t header_bytes(uint32_t bits) const {
        if (scales == HEADERS) return group_bytes(bits) * (columns == 32 ? 2 : 1);
        return scales == BYTES ? TILE_ROWS * 2 * (minimum != 0 ? 2 : 1) : 0;
    }
};

// The parameters of a kernel that are the numbers of a format, and the format.
#define FORMAT_NUMBERS \
    uint32_t zero, uint32_t scales, uint32_t minimum, uint32_t columns, uint32_t exponent
#define FORMAT_OF_NUMBERS \
    PackedFormat { zero, scales, minimum, columns, exponent }

DEVICE constexpr uint32_t group_columns(uint32_t bits) { return bits == 6 ? 16 : 32; }
DEVICE constexpr uint32_t groups_of_tile(uint32_t bits) {
    return TILE_COLUMNS / group_columns(bits);
}
DEVICE constexpr uint32_t code_bytes(uint32_t bits) { return TILE_ROWS * TILE_COLUMNS * bits / 8; }

// Two codes of eight bits less 128, in bf16. The low seven bits are added to 128. Then 128 is
// subtracted if a code's high bit is set, and 256 if it is not.
DEVICE uint32_t less_128(uint32_t codes) {
    return subtract_pairs((codes & 0x007f007fu) | TWO_128, (~codes & 0x00800080u) | TWO_128);
}

// Two codes that are floats of so many bits, in bf16. Their bits are those of numbers that are
// smaller by a power of two, the difference of the exponents' offsets.
DEVICE uint32_t widened_floats(uint32_t codes, uint32_t bits, uint32_t exponent) {
    uint32_t sign = (1u << (bits - 1)) * 0x00010001u, magnitude = sign - 0x00010001u,
             factor = ((255 - (1u << (exponent - 1))) << 7) * 0x00010001u;
    return multiply_pairs(
        (codes & sign) << (16 - bits) | (codes & magnitude) << (8 - bits + exponent), factor);
}

// Finds the tiles and headers of a band of 32 rows.
struct PackedBand {
    const unsigned char* begin;
    uint32_t tile_bytes, header_bytes, header_shift, tiles;

    DEVICE PackedBand(
        const unsigned char* w, uint32_t band, uint32_t cols, uint32_t bits, const PackedFormat& f)
        : tile_bytes(code_bytes(bits) + f.scale_bytes(groups_of_tile(bits))),
          header_bytes(f.header_bytes(bits)),
          header_shift(f.header_shift()),
          tiles((cols + TILE_COLUMNS - 1) / TILE_COLUMNS) {
        uint32_t headers = (cols + (1u << header_shift) - 1) >> header_shift;
        begin = w + static_cast<size_t>(band) * (tiles * tile_bytes + headers * header_bytes);
    }
    DEVICE const unsigned char* tile(uint32_t column) const {
        return begin + static_cast<size_t>(column / TILE_COLUMNS) * tile_bytes;
    }
    DEVICE const unsigned char* header(uint32_t column) const {
        return begin + static_cast<size_t>(tiles) * tile_bytes +
               (column >> header_shift) * header_bytes;
    }
};

// The scale, the minimum and the code that means zero of a group in each of N neighbouring rows of
// a tile.
template <uint32_t N>
struct GroupScales {
    float scale[N], minimum[N];
    uint32_t zero[N];

    DEVICE void load_from(const unsigned char* scales, const unsigned char* header, uint32_t bits,
        uint32_t group, uint32_t row, const PackedFormat& f) {
        uint32_t groups = groups_of_tile(bits);
#pragma unroll
        for (uint32_t i = 0; i < N; i++) zero[i] = f.zero;
        // No format of five or six bits has its scales in headers.
        if (bits % 4 == 0 && f.scales == HEADERS) {
            header += f.columns == 32 ? group * f.group_bytes(bits) : 0;
            halves(scale, header + row * 2);
#pragma unroll
            for (uint32_t i = 0; i < N; i++) scale[i] *= HEADER_UNIT;
            if (f.exponent == 0) load_zeros(header + TILE_ROWS * 2, bits, row);
        } else if (f.scales == EXPONENTS) {
            powers(scale, scales + group * TILE_ROWS + row);
        } else if (f.scales == BYTES) {
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
    DEVICE void load_zeros(const unsigned char* zeros, uint32_t bits, uint32_t row) {
        if (bits == 8) {
            Vec<uint8_t, N> bytes = load<uint8_t, N>(zeros + row);
#pragma unroll
            for (uint32_t i = 0; i < N; i++) zero[i] = bytes.at[i];
        } else {
            uint32_t four = *reinterpret_cast<const uint16_t*>(zeros + row / 4 * 2);
#pragma unroll
            for (uint32_t i = 0; i < N; i++) zero[i] = four >> ((row % 4 + i) * 4) & 15;
        }
    }
    DEVICE static void halves(float (&to)[N], const unsigned char* from) {
        Vec<uint16_t, N> bits = load<uint16_t, N>(reinterpret_cast<const uint16_t*>(from));
#pragma unroll
        for (uint32_t i = 0; i < N; i++) to[i] = half_to_float(bits.at[i]);
    }
    // 2^(byte - 127). The lowest is subnormal.
    DEVICE static void powers(float (&to)[N], const unsigned char* from) {
        Vec<uint8_t, N> bytes = load<uint8_t, N>(from);
#pragma unroll
        for (uint32_t i = 0; i < N; i++) {
            uint32_t byte = bytes.at[i];
            to[i] = __uint_as_float(byte == 0 ? 1u << 22 : byte << 23);
        }
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
template <uint32_t BITS, bool FLOATS>
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

    // The numbers that the codes of a tile mean, before scale and minimum. `zeros` are those of the
    // group in the lane's rows.
    DEVICE void fragment(uint32_t (&a)[4], uint32_t step, uint32_t tile, const uint32_t (&zeros)[4],
        const PackedFormat& f) const {
#pragma unroll
        for (uint32_t r = 0; r < 4; r++) {
            uint32_t codes = pair(step, tile, r), zero = zeros[2 * tile + r % 2] * 0x00010001u;
            if constexpr (FLOATS) {
                a[r] = widened_floats(codes, BITS, f.exponent);
            } else if constexpr (BITS == 8) {
                // Formats without zeros have the zero 128.
                a[r] = less_128(codes);
                if (f.has_zeros()) a[r] = subtract_pairs(a[r], less_128(zero));
            } else {
                a[r] = subtract_pairs(codes | TWO_128, TWO_128 + zero);
            }
        }
    }

  private:
    // The two codes of a register. Codes of eight bits have other codes above them.
    DEVICE uint32_t pair(uint32_t step, uint32_t tile, uint32_t r) const {
        if constexpr (BITS == 8) return low[step].at[tile * 2 + r / 2] >> (r % 2 * 8);
        uint32_t codes = (low[step / 2].at[step % 2 * 2 + tile] >> (r * 4)) & 0x000f000fu;
        if constexpr (HIGH == 1)
            codes |= ((high.at[step / 2] >> (step % 2 * 8 + tile * 4 + r)) & 0x00010001u) << 4;
        if constexpr (HIGH == 2)
            codes |= ((high.at[step] >> (tile * 8 + r * 2)) & 0x00030003u) << 4;
        return codes;
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
    uint32_t inside = row % TILE_ROWS;
    GroupScales<1> group{};
    group.load_from(tile + code_bytes(bits), band.header(column), bits,
        column % TILE_COLUMNS / group_columns(bits), inside, f);
    uint32_t code = code_at(tile, bits, inside, column % TILE_COLUMNS);
    float number =
        f.exponent != 0
            ? __uint_as_float(widened_floats(code, bits, f.exponent) << 16)
            : static_cast<float>(static_cast<int32_t>(code) - static_cast<int32_t>(group.zero[0]));
    float value = group.scale[0] * number;
    return f.minimum != 0 ? value + group.minimum[0] : value;
}

}  // namespace
