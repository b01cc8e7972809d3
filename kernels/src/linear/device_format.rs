//! The form in which a device keeps block-quantised weights: codes as the file has them, in the
//! order in which the lanes of a warp multiply them.
//!
//! A matrix is cut into bands of 32 rows, of which the last is filled up with zeros. A band is made
//! of tiles of 64 columns, then of headers of 256 columns. A tile holds
//! - its codes: word `step % 2 * 2 + i` of vector `[step / 2][lane]` of four words holds the low
//!   four bits of eight codes, and the vectors behind them hold the bits above; of codes with eight
//!   bits, vector `[step][lane]` holds all bits;
//! - for each group of columns a scale per row, then for each group a minimum per row, if the
//!   format has them: as f16 numbers, or as bytes that multiply those of the header.
//!
//! A header holds an f16 factor of the scales per row, and one of the minimums. `packed.cuh` reads
//! all of this. The form takes as many bytes as the file, except for the k-quants with minimums,
//! whose scales of six bits become bytes (2 to 3 % more).

use super::format::{self, BLOCK, Scales};
use super::pack::{SuperBlock, unpack};
use crate::gpu::Arg;
use crate::linear::WeightType;
use crate::storage::ensure;
use crate::{Result, args};

/// Rows of a band, columns of a tile, columns of a header.
pub const BAND_ROWS: usize = 32;
const TILE_COLUMNS: usize = 64;
const HEADER_COLUMNS: usize = 256;

/// A format of the files in the form that devices keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceFormat {
    dtype: WeightType,
    /// Bits of a code: 4, 5, 6 or 8.
    bits: usize,
    /// The code that means zero.
    zero: usize,
    /// Columns of a group.
    group: usize,
    /// Whether scales are bytes that multiply those of a header.
    bytes: bool,
    minimum: bool,
}

/// The types of the files that devices keep in this form.
pub fn packed_types() -> impl Iterator<Item = WeightType> {
    format::TYPES.iter().copied().filter(|dtype| DeviceFormat::of(*dtype).is_some())
}

impl DeviceFormat {
    /// `None`: a device keeps this type dense.
    pub fn of(dtype: WeightType) -> Option<Self> {
        let format = format::of(dtype)?;
        // Kernels know the group by the bits. The formats of two and three bits are left out: their
        // scales, of four bits and six for sixteen columns, would take up to a fifth more here. So
        // are those whose codes stand for numbers in a table, as kernels have no look-up, and those
        // with a zero for each group, as kernels have one for all.
        let bits = format.low + format.high;
        let known = bits >= 4
            && format.scales != Scales::Nibbles
            && format.table.is_none()
            && !format.zeros;
        known.then_some(Self {
            dtype,
            bits,
            zero: format.zero as usize,
            group: format.group,
            bytes: format.scales == Scales::Bytes,
            minimum: format.min,
        })
    }

    pub(crate) fn bits(&self) -> usize {
        self.bits
    }

    /// The arguments by which kernels know the format: the zero, whether scales are bytes, and
    /// whether there are minimums.
    pub(crate) fn numbers(&self) -> [Arg; 3] {
        args![self.zero, u32::from(self.bytes), u32::from(self.minimum)]
    }

    fn groups(&self) -> usize {
        TILE_COLUMNS / self.group
    }

    fn code_bytes(&self) -> usize {
        BAND_ROWS * TILE_COLUMNS * self.bits / 8
    }

    /// Bytes of the scales, or of the minimums, of a group.
    fn group_bytes(&self) -> usize {
        BAND_ROWS * if self.bytes { 1 } else { 2 }
    }

    fn tile_bytes(&self) -> usize {
        let values = if self.minimum { 2 } else { 1 };
        self.code_bytes() + self.groups() * self.group_bytes() * values
    }

    fn header_bytes(&self) -> usize {
        match (self.bytes, self.minimum) {
            (false, _) => 0,
            (true, false) => BAND_ROWS * 2,
            (true, true) => BAND_ROWS * 4,
        }
    }

    /// Bytes of a band of a matrix of so many columns.
    pub fn band_bytes(&self, cols: usize) -> usize {
        cols.div_ceil(TILE_COLUMNS) * self.tile_bytes()
            + cols.div_ceil(HEADER_COLUMNS) * self.header_bytes()
    }

    /// Bytes of a matrix.
    pub fn bytes(&self, rows: usize, cols: usize) -> usize {
        rows.div_ceil(BAND_ROWS) * self.band_bytes(cols)
    }

    /// Packs whole bands: `raw` has the blocks of rows of `cols` columns, and `out` the bytes of as
    /// many bands as they take.
    pub fn pack(&self, raw: &[u8], cols: usize, out: &mut [u8]) -> Result<()> {
        const OP: &str = "packing";
        let (columns, block_bytes) = (self.dtype.block_size(), self.dtype.type_size());
        ensure(OP, cols > 0 && cols.is_multiple_of(columns), || {
            format!("{cols} columns are not whole {:?} blocks", self.dtype)
        })?;
        let row_bytes = cols / columns * block_bytes;
        let rows = raw.len() / row_bytes;
        let fits = raw.len() == rows * row_bytes && out.len() == self.bytes(rows, cols);
        ensure(OP, fits, || {
            format!("{} bytes of {cols} columns do not fill {}", raw.len(), out.len())
        })?;
        out.fill(0);
        let bands = out.chunks_exact_mut(self.band_bytes(cols));
        let mut unpacked = SuperBlock::EMPTY;
        for (band, rows) in bands.zip(raw.chunks(BAND_ROWS * row_bytes)) {
            let (tiles, headers) =
                band.split_at_mut(cols.div_ceil(TILE_COLUMNS) * self.tile_bytes());
            for (row, blocks) in rows.chunks_exact(row_bytes).enumerate() {
                for (i, block) in blocks.chunks_exact(block_bytes).enumerate() {
                    unpack(self.dtype, block, &mut unpacked);
                    self.place(&unpacked, row, i * columns, tiles);
                    self.place_header(&unpacked, row, i * columns, headers);
                }
            }
        }
        Ok(())
    }

    /// Places a block of a row that begins at a column.
    fn place(&self, block: &SuperBlock, row: usize, column: usize, tiles: &mut [u8]) {
        let parts = block.codes.chunks_exact(BLOCK).take(self.dtype.block_size() / BLOCK);
        for (i, codes) in parts.enumerate() {
            let column = column + i * BLOCK;
            let tile = &mut tiles[column / TILE_COLUMNS * self.tile_bytes()..][..self.tile_bytes()];
            let (places, scales) = tile.split_at_mut(self.code_bytes());
            let inside = column % TILE_COLUMNS;
            for (step, codes) in (inside / 16..).zip(codes.chunks_exact(16)) {
                self.place_codes(codes, row, step, places);
            }
            for group in 0..BLOCK / self.group {
                let from = i * BLOCK / self.group + group;
                self.place_scale(block, from, row, inside / self.group + group, scales);
            }
        }
    }

    /// Places sixteen codes of a row. A lane has four of them: two neighbours, and the two that are
    /// eight columns further.
    fn place_codes(&self, codes: &[u8], row: usize, step: usize, out: &mut [u8]) {
        let (tile, odd) = (row % 4 / 2, row % 2);
        for t in 0..4 {
            let lane = row / 4 * 4 + t;
            let four = [0, 1, 8, 9].map(|column| u32::from(codes[2 * t + column]));
            if self.bits == 8 {
                let word = (step * 32 + lane) * 4 + tile * 2;
                merge(out, word, spread(four, odd * 8, None));
                merge(out, word + 1, spread([four[2], four[3], 0, 0], odd * 8, None));
                continue;
            }
            let word = (step / 2 * 32 + lane) * 4 + step % 2 * 2 + tile;
            merge(out, word, spread(four.map(|code| code & 15), odd * 4, Some(8)));
            let high = self.bits - 4;
            if high > 0 {
                let word = 2 * 32 * 4 + lane * 2 * high + step * high / 2;
                let place = (step * 8 * (2 - high)) % 16 + (tile * 4 + odd) * high;
                merge(out, word, spread(four.map(|code| code >> 4), place, Some(2 * high)));
            }
        }
    }

    fn place_scale(
        &self,
        block: &SuperBlock,
        from: usize,
        row: usize,
        group: usize,
        out: &mut [u8],
    ) {
        let (scales, minimums) = out.split_at_mut(self.groups() * self.group_bytes());
        let at = group * self.group_bytes();
        if self.bytes {
            scales[at + row] = block.scales[from];
            if self.minimum {
                minimums[at + row] = block.mins[from];
            }
        } else {
            put(block.d, row, &mut scales[at..]);
            if self.minimum {
                put(block.m, row, &mut minimums[at..]);
            }
        }
    }

    fn place_header(&self, block: &SuperBlock, row: usize, column: usize, headers: &mut [u8]) {
        if self.bytes {
            let header = &mut headers[column / HEADER_COLUMNS * self.header_bytes()..];
            put(block.d, row, header);
            if self.minimum {
                put(block.m, BAND_ROWS + row, header);
            }
        }
    }
}

/// A word that has the first of each two codes in its low half and the second in its high half: the
/// first two at `place`, and the other two `further` bits higher, if they belong to it.
fn spread(four: [u32; 4], place: usize, further: Option<usize>) -> u32 {
    let pair = |first: u32, second: u32| first | second << 16;
    let others = further.map_or(0, |bits| pair(four[2], four[3]) << bits);
    (pair(four[0], four[1]) | others) << place
}

/// Adds the bits of a word to those that are there.
fn merge(out: &mut [u8], word: usize, bits: u32) {
    for (byte, more) in out[4 * word..][..4].iter_mut().zip(bits.to_le_bytes()) {
        *byte |= more;
    }
}

fn put(f16_bits: u16, index: usize, out: &mut [u8]) {
    out[2 * index..][..2].copy_from_slice(&f16_bits.to_le_bytes());
}
