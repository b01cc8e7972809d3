// The packed form of block-quantised weights, as kernels read it. linear/device_format.rs describes
// and writes it.
#pragma once

#include "common.cuh"

namespace {

// Rows and columns of a tile.
constexpr uint32_t TILE_ROWS = 32, TILE_COLUMNS = 64;
// 128 in bf16. The integers up to 255 follow it by their bits, so that a code's bits are added to
// those of 128 to make the number 128 + code.
constexpr uint32_t ONE_128 = 0x4300, TWO_128 = ONE_128 << 16 | ONE_128,
                   TWO_256 = TWO_128 | 0x00800080u;

// The forms of scales: an f16 for each group; a byte for each group, by which an f16 of the header
// is multiplied; a power of two for each group, by its exponent; an f16 in the header, in units of
// 2^-12, and beside integers the code that means zero.
constexpr uint32_t HALVES = 0, BYTES = 1, EXPONENTS = 2, HEADERS = 3;
constexpr float HEADER_UNIT = 1.0f / 4096.0f;

// A format that is known when a kernel is compiled, so that nothing is decided for each tile, but
// for two numbers.
template <uint32_t BITS_, bool FLOATS_, uint32_t SCALES_, bool MINIMUM_>
struct PackedFormat {
    static constexpr uint32_t BITS = BITS_, SCALES = SCALES_;
    static constexpr bool FLOATS = FLOATS_, MINIMUM = MINIMUM_;
    // Whether each group has a code of its own that means zero.
    static constexpr bool ZEROS = SCALES == HEADERS && !FLOATS;
    // Otherwise the integer that means zero is this one.
    static constexpr uint32_t ZERO = FLOATS || MINIMUM || ZEROS ? 0 : 1u << (BITS - 1);
    static constexpr uint32_t GROUP_COLUMNS = BITS == 6 ? 16 : 32,
                              GROUPS = TILE_COLUMNS / GROUP_COLUMNS;
    static constexpr uint32_t CODES = TILE_ROWS * TILE_COLUMNS * BITS / 8;
    // Bytes of the scales, and of the minimums, of a group in a tile.
    static constexpr uint32_t GROUP_BYTES =
        SCALES == HEADERS ? 0 : TILE_ROWS * (SCALES == HALVES ? 2 : 1);
    static constexpr uint32_t TILE_BYTES = CODES + GROUPS * GROUP_BYTES * (MINIMUM ? 2 : 1);
    // Bytes of the scales, and of the zeros, of columns that share a scale of a header.
    static constexpr uint32_t HEADER_GROUP = TILE_ROWS * 2 + (ZEROS ? TILE_ROWS * BITS / 8 : 0);

    uint32_t columns;   // columns that share a scale of a header: 32, 64, 128
    uint32_t exponent;  // bits of the exponent of codes that are floats

    // The columns of a header are a power of two.
    DEVICE uint32_t header_shift() const { return SCALES != HEADERS ? 8 : columns == 128 ? 7 : 6; }
    DEVICE uint32_t header_bytes() const {
        if (SCALES == HEADERS) return HEADER_GROUP * (columns == 32 ? 2 : 1);
        return SCALES == BYTES ? TILE_ROWS * 2 * (MINIMUM ? 2 : 1) : 0;
    }
    DEVICE uint32_t band_bytes(uint32_t cols) const {
        uint32_t shift = header_shift();
        return (cols + TILE_COLUMNS - 1) / TILE_COLUMNS * TILE_BYTES +
               ((cols + (1u << shift) - 1) >> shift) * header_bytes();
    }
};

// The numbers of a format that a kernel is given.
struct FormatNumbers {
    uint32_t scales, minimum, columns, exponent;
};
// The parameters of a kernel that are these numbers, and the numbers.
#define FORMAT_PARAMETERS uint32_t scales, uint32_t minimum, uint32_t columns, uint32_t exponent
#define FORMAT_NUMBERS \
    FormatNumbers { scales, minimum, columns, exponent }

// Calls `body` with the format of these numbers, among those whose codes have BITS bits.
template <uint32_t BITS, bool FLOATS, class Body>
DEVICE void with_format(const FormatNumbers& numbers, Body body) {
    uint32_t columns = numbers.columns, exponent = numbers.exponent;
    if constexpr (FLOATS) {
        constexpr uint32_t SCALES = BITS == 4 ? EXPONENTS : HEADERS;
        body(PackedFormat<BITS, true, SCALES, false>{columns, exponent});
    } else if constexpr (BITS == 6) {
        body(PackedFormat<6, false, BYTES, false>{columns, exponent});
    } else {
        // No format of five bits has its scales in headers.
        if constexpr (BITS != 5)
            if (numbers.scales == HEADERS)
                return body(PackedFormat<BITS, false, HEADERS, false>{columns, exponent});
        if constexpr (BITS != 8) {
            if (numbers.scales == BYTES)
                return body(PackedFormat<BITS, false, BYTES, true>{columns, exponent});
            if (numbers.minimum != 0)
                return body(PackedFormat<BITS, false, HALVES, true>{columns, exponent});
        }
        body(PackedFormat<BITS, false, HALVES, false>{columns, exponent});
    }
}

// The same for any number of bits.
template <class Body>
DEVICE void with_any_format(uint32_t bits, const FormatNumbers& numbers, Body body) {
    bool floats = numbers.exponent != 0;
    if (floats && bits == 4) return with_format<4, true>(numbers, body);
    if (floats) return with_format<8, true>(numbers, body);
    if (bits == 4) return with_format<4, false>(numbers, body);
    if (bits == 5) return with_format<5, false>(numbers, body);
    if (bits == 6) return with_format<6, false>(numbers, body);
    with_format<8, false>(numbers, body);
}

// Two codes of eight bits less 128, in bf16. The low seven bits are added to 128. Then 128 is
// subtracted if a code's high bit is set, and 256 if it is not.
DEVICE uint32_t less_128(uint32_t codes) {
    return subtract_pairs(
        masked_xor(codes, 0x007f007fu, TWO_128), masked_xor(codes, 0x00800080u, TWO_256));
}

// Two codes that are floats of `bits` bits, in bf16. Their bits are those of numbers that are
// smaller by a power of two, the difference of the exponents' offsets.
DEVICE uint32_t widened_floats(uint32_t codes, uint32_t bits, uint32_t exponent) {
    uint32_t sign = (1u << (bits - 1)) * 0x00010001u, magnitude = sign - 0x00010001u,
             factor = ((255 - (1u << (exponent - 1))) << 7) * 0x00010001u;
    return multiply_pairs(
        (codes & sign) << (16 - bits) | (codes & magnitude) << (8 - bits + exponent), factor);
}

// Finds the tiles and headers of a band of 32 rows.
template <class Format>
struct PackedBand {
    const unsigned char *tiles, *headers;
    uint32_t header_shift, header_bytes;

    DEVICE PackedBand(const unsigned char* w, uint32_t band, uint32_t cols, const Format& format)
        : tiles(w + static_cast<size_t>(band) * format.band_bytes(cols)),
          headers(tiles + (cols + TILE_COLUMNS - 1) / TILE_COLUMNS * Format::TILE_BYTES),
          header_shift(format.header_shift()),
          header_bytes(format.header_bytes()) {}
    DEVICE const unsigned char* tile(uint32_t column) const {
        return tiles + column / TILE_COLUMNS * Format::TILE_BYTES;
    }
    DEVICE const unsigned char* header(uint32_t column) const {
        return headers + (column >> header_shift) * header_bytes;
    }
};

// The scale, the minimum and the code that means zero of a group in each of N neighbouring rows of
// a tile.
template <class Format, uint32_t N>
struct GroupScales {
    float scale[N], minimum[N];
    uint32_t zero[N];

    DEVICE void load_from(const unsigned char* scales, const unsigned char* header, uint32_t group,
        uint32_t row, const Format& format) {
        const unsigned char* minimums = scales + Format::GROUPS * Format::GROUP_BYTES;
#pragma unroll
        for (uint32_t i = 0; i < N; i++) zero[i] = Format::ZERO;
        if constexpr (Format::SCALES == HEADERS) {
            header += format.columns == 32 ? group * Format::HEADER_GROUP : 0;
            halves(scale, header + row * 2);
#pragma unroll
            for (uint32_t i = 0; i < N; i++) scale[i] *= HEADER_UNIT;
            if constexpr (Format::ZEROS) load_zeros(header + TILE_ROWS * 2, row);
        } else if constexpr (Format::SCALES == EXPONENTS) {
            powers(scale, scales + group * TILE_ROWS + row);
        } else if constexpr (Format::SCALES == BYTES) {
            uint32_t at = group * TILE_ROWS + row;
            scaled(scale, scales + at, header + row * 2);
            if constexpr (Format::MINIMUM)
                scaled(minimum, minimums + at, header + (TILE_ROWS + row) * 2);
        } else {
            uint32_t at = (group * TILE_ROWS + row) * 2;
            halves(scale, scales + at);
            if constexpr (Format::MINIMUM) halves(minimum, minimums + at);
        }
    }

  private:
    DEVICE void load_zeros(const unsigned char* zeros, uint32_t row) {
        if constexpr (Format::BITS == 8) {
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
template <class Format>
struct LaneCodes {
    static constexpr uint32_t BITS = Format::BITS, CHUNKS = BITS == 8 ? 4 : 2,
                              HIGH = BITS == 8 ? 0 : BITS - 4;

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
    // group in the lane's rows, as pairs to be subtracted.
    DEVICE void fragment(uint32_t (&a)[4], uint32_t step, uint32_t tile, const uint32_t (&zeros)[4],
        const Format& format) const {
#pragma unroll
        for (uint32_t r = 0; r < 4; r++) {
            uint32_t zero = zeros[2 * tile + r % 2];
            if constexpr (Format::FLOATS) {
                a[r] = widened_floats(pair(step, tile, r, 0), BITS, format.exponent);
            } else if constexpr (BITS == 8) {
                // Formats without zeros have the zero 128.
                a[r] = less_128(pair(step, tile, r, 0));
                if constexpr (Format::ZEROS) a[r] = subtract_pairs(a[r], zero);
            } else {
                a[r] = subtract_pairs(pair(step, tile, r, TWO_128), zero);
            }
        }
    }
    DEVICE static void to_subtract(uint32_t (&zeros)[4]) {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            zeros[i] *= 0x00010001u;
            zeros[i] = BITS == 8 ? less_128(zeros[i]) : TWO_128 + zeros[i];
        }
    }

    // The codes of a tile plus 128. Codes have at most seven bits.
    DEVICE void plus_128(uint32_t (&a)[4], uint32_t step, uint32_t tile) const {
        static_assert(!Format::FLOATS && BITS < 8);
#pragma unroll
        for (uint32_t r = 0; r < 4; r++) a[r] = pair(step, tile, r, TWO_128);
    }

  private:
    // The two codes of a register, and the bits of `others`. Codes of eight bits have other codes
    // above them.
    DEVICE uint32_t pair(uint32_t step, uint32_t tile, uint32_t r, uint32_t others) const {
        if constexpr (BITS == 8) return low[step].at[tile * 2 + r / 2] >> (r % 2 * 8);
        if constexpr (HIGH == 1)
            others = masked_xor(
                to_bit_4(high.at[step / 2], step % 2 * 8 + tile * 4 + r), 0x00100010u, others);
        if constexpr (HIGH == 2)
            others = masked_xor(to_bit_4(high.at[step], tile * 8 + r * 2), 0x00300030u, others);
        return masked_xor(low[step / 2].at[step % 2 * 2 + tile] >> (r * 4), 0x000f000fu, others);
    }
    DEVICE static uint32_t to_bit_4(uint32_t word, uint32_t bit) {
        return bit < 4 ? word << (4 - bit) : word >> (bit - 4);
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
template <class Format>
DEVICE float weight_at(
    const unsigned char* w, uint32_t row, uint32_t column, uint32_t cols, const Format& format) {
    PackedBand<Format> band(w, row / TILE_ROWS, cols, format);
    const unsigned char* tile = band.tile(column);
    uint32_t inside = row % TILE_ROWS;
    GroupScales<Format, 1> group{};
    group.load_from(tile + Format::CODES, band.header(column),
        column % TILE_COLUMNS / Format::GROUP_COLUMNS, inside, format);
    uint32_t code = code_at(tile, Format::BITS, inside, column % TILE_COLUMNS);
    float number =
        Format::FLOATS
            ? __uint_as_float(widened_floats(code, Format::BITS, format.exponent) << 16)
            : static_cast<float>(static_cast<int32_t>(code) - static_cast<int32_t>(group.zero[0]));
    float value = group.scale[0] * number;
    return Format::MINIMUM ? value + group.minimum[0] : value;
}

}  // namespace

// Applies a macro to each form of codes that kernels are made for: the name, the bits of a code,
// and whether it is a float.
#define CODE_FORMS(X) \
    X(q4, 4, false) X(q5, 5, false) X(q6, 6, false) X(q8, 8, false) X(f4, 4, true) X(f8, 8, true)
