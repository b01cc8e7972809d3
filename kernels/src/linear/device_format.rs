//! The form in which a device keeps block-quantised weights: codes as the file has them, in the
//! order in which the lanes of a warp multiply them.
//!
//! A matrix is cut into bands of 32 rows, of which the last is filled up with zeros. A band is made
//! of tiles of 64 columns, then of headers of 256 columns. A tile holds
//! - its codes: word `step % 2 * 2 + i` of vector `[step / 2][lane]` of four words holds the low
//!   four bits of eight codes, and the vectors behind them hold the bits above; of codes with eight
//!   bits, vector `[step][lane]` holds all bits;
//! - for each group of columns a scale per row, then for each group a minimum per row, if the
//!   format has them: as f16 numbers, as bytes that multiply those of the header, or as exponents.
//!
//! A header holds an f16 factor of the scales per row, and one of the minimums. In the formats of
//! Hugging Face's folders, whose groups are of up to 128 columns, it holds the scales themselves
//! instead, as f16 numbers in units of 2^-12, and then the codes that mean zero, in the bits of a
//! code each; a header is for the columns of a group or of a tile, whichever are more. Scales of
//! those files that are f16 or bf16 keep their values so, and those that are f32 are rounded to
//! eleven bits. `packed.cuh` reads all of this. The form takes as many bytes as the file, except
//! for the k-quants with minimums, whose scales of six bits become bytes (2 to 3 % more), and the
//! matrices of folders, where those of a block or a row become those of 128 columns (up to 3 %
//! more; 6 % for floats whose columns are no multiple of 128).

use super::format::{self, BLOCK, Format, Scales};
use super::pack::unpack;
use super::super_block::SuperBlock;
use crate::error::ensure;
use crate::gpu::Arg;
use crate::linear::WeightType;
use crate::{Result, args};
use half::f16;

const OP: &str = "packing";

/// Rows of a band, columns of a tile.
pub const BAND_ROWS: usize = 32;
const TILE_COLUMNS: usize = 64;
/// By this a scale of a folder's matrix is multiplied where it becomes an f16. The smallest of FP8
/// are then normal numbers, and those below 16 fit.
const SCALE_FACTOR: f32 = 4096.0;
/// The largest that becomes a finite f16.
const LARGEST_SCALE: f32 = 65_504.0 / SCALE_FACTOR;

/// The form in which a device keeps the scales of groups. The numbers are those of `packed.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DeviceScales {
    /// An f16 in the tile.
    Halves = 0,
    /// A byte in the tile, which multiplies the f16 of a header.
    Bytes = 1,
    /// The exponent of a power of two, in the tile.
    Exponents = 2,
    /// An f16 in the header, and beside integers the code that means zero.
    Headers = 3,
}

/// A format of the files in the form that devices keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceFormat {
    dtype: WeightType,
    /// Bits of a code: 4, 5, 6 or 8.
    bits: u16,
    /// Bits of the exponent of codes that are floats; 0: codes are integers.
    exponent: u16,
    /// Columns of a group.
    group: u16,
    scales: DeviceScales,
    minimum: bool,
}

/// The types of the files that devices keep in this form.
pub fn packed_types() -> impl Iterator<Item = WeightType> {
    const FLOATS: [WeightType; 3] =
        [WeightType::E4M3By32, WeightType::E4M3By128, WeightType::E5M2By32];
    let all = format::TYPES.iter().copied().chain(FLOATS);
    all.filter(|dtype| DeviceFormat::of(*dtype).is_some())
}

impl DeviceFormat {
    /// `None`: a device keeps this type dense.
    pub fn of(dtype: WeightType) -> Option<Self> {
        match dtype {
            WeightType::MXFP4 => Some(Self::floats(dtype, 4, 2, DeviceScales::Exponents)),
            WeightType::E4M3By32 | WeightType::E4M3By128 => {
                Some(Self::floats(dtype, 8, 4, DeviceScales::Headers))
            }
            WeightType::E5M2By32 => Some(Self::floats(dtype, 8, 5, DeviceScales::Headers)),
            _ => Self::integers(dtype, &format::of(dtype)?),
        }
    }

    const fn floats(dtype: WeightType, bits: u16, exponent: u16, scales: DeviceScales) -> Self {
        let group = dtype.block_size() as u16;
        Self { dtype, bits, exponent, group, scales, minimum: false }
    }

    fn integers(dtype: WeightType, format: &Format) -> Option<Self> {
        // Kernels know the group by the bits. The formats of two and three bits are left out: their
        // scales, of four bits and six for sixteen columns, would take up to a fifth more here. So
        // are those whose codes stand for numbers in a table, as kernels have no look-up.
        let bits = (format.low + format.high) as u16;
        let known = bits >= 4 && format.table.is_none();
        let scales = match format.scales {
            _ if format.zeros => DeviceScales::Headers,
            Scales::Direct => DeviceScales::Halves,
            Scales::Bytes => DeviceScales::Bytes,
            Scales::Nibbles => return None,
        };
        let group = if format.zeros { format.super_cols } else { format.group };
        let (group, minimum) = (group as u16, format.min);
        known.then_some(Self { dtype, bits, exponent: 0, group, scales, minimum })
    }

    pub(crate) fn bits(&self) -> usize {
        self.bits.into()
    }

    /// Columns of a group.
    pub(crate) fn group(&self) -> usize {
        self.group.into()
    }

    /// Whether codes are floats.
    pub(crate) fn is_float(&self) -> bool {
        self.exponent > 0
    }

    /// Whether codes are those of E4M3, in which activations have codes too.
    pub fn is_e4m3(&self) -> bool {
        self.bits == 8 && self.exponent == 4
    }

    /// The arguments by which kernels know the format, `FORMAT_PARAMETERS` of `packed.cuh`.
    pub(crate) fn numbers(&self) -> [Arg; 4] {
        let &Self { exponent, group, scales, minimum, .. } = self;
        args![scales as u32, u32::from(minimum), u32::from(group), u32::from(exponent)]
    }

    /// Groups of a tile that have their scales in it.
    fn groups(&self) -> usize {
        if self.scales == DeviceScales::Headers { 0 } else { TILE_COLUMNS / self.group() }
    }

    fn code_bytes(&self) -> usize {
        BAND_ROWS * TILE_COLUMNS * self.bits() / 8
    }

    /// Bytes of the scales, or of the minimums, of a group in a tile.
    fn group_bytes(&self) -> usize {
        BAND_ROWS * if self.scales == DeviceScales::Halves { 2 } else { 1 }
    }

    fn tile_bytes(&self) -> usize {
        let values = if self.minimum { 2 } else { 1 };
        self.code_bytes() + self.groups() * self.group_bytes() * values
    }

    /// Columns of a header.
    fn header_columns(&self) -> usize {
        if self.scales == DeviceScales::Headers { self.group().max(TILE_COLUMNS) } else { 256 }
    }

    /// Bytes of the scales, and of the zeros, of a group in a header.
    fn header_group_bytes(&self) -> usize {
        BAND_ROWS * 2 + if self.is_float() { 0 } else { BAND_ROWS * self.bits() / 8 }
    }

    fn header_bytes(&self) -> usize {
        match self.scales {
            DeviceScales::Halves | DeviceScales::Exponents => 0,
            DeviceScales::Bytes => BAND_ROWS * if self.minimum { 4 } else { 2 },
            DeviceScales::Headers => {
                self.header_columns() / self.group() * self.header_group_bytes()
            }
        }
    }

    /// Bytes of a band of a matrix of `cols` columns.
    pub fn band_bytes(&self, cols: usize) -> usize {
        cols.div_ceil(TILE_COLUMNS) * self.tile_bytes()
            + cols.div_ceil(self.header_columns()) * self.header_bytes()
    }

    /// Bytes of a matrix.
    pub fn bytes(&self, rows: usize, cols: usize) -> usize {
        rows.div_ceil(BAND_ROWS) * self.band_bytes(cols)
    }

    /// Packs whole bands: `raw` has the blocks of rows of `cols` columns, and `out` the bytes of as
    /// many bands as they take.
    ///
    /// # Errors
    /// When the bytes are not whole rows, or when a scale or a code of a folder's matrix is beyond
    /// those that a device computes with.
    pub fn pack(&self, raw: &[u8], cols: usize, out: &mut [u8]) -> Result<()> {
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
                    self.check_values(&unpacked)?;
                    self.place(&unpacked, row, i * columns, tiles);
                    self.place_header(&unpacked, row, i * columns, headers);
                }
            }
        }
        Ok(())
    }

    /// Whether each row of packed bands has the same scale in all of its `cols` columns. It is for
    /// formats of floats that have their scales in headers.
    pub fn has_row_scales(&self, bands: &[u8], cols: usize) -> bool {
        let tiles = cols.div_ceil(TILE_COLUMNS) * self.tile_bytes();
        bands.chunks_exact(self.band_bytes(cols)).all(|band| {
            let mut groups =
                band[tiles..].chunks_exact(self.header_group_bytes()).take(cols / self.group());
            groups.next().is_none_or(|first| groups.all(|own| own == first))
        })
    }

    /// Refuses what kernels would take for another number.
    fn check_values(&self, block: &SuperBlock) -> Result<()> {
        if self.scales != DeviceScales::Headers {
            return Ok(());
        }
        ensure(OP, block.scale.abs() <= LARGEST_SCALE, || {
            format!("a scale of {} on a device, which has none above 15.99", block.scale)
        })?;
        let last = match self.exponent {
            0 => u8::MAX,
            4 => 0x7e,
            _ => 0x7b,
        };
        let mut codes = block.codes[..self.dtype.block_size()].iter();
        let known = !self.is_float() || codes.all(|code| code & 0x7f <= last);
        ensure(OP, known, || "a code that stands for no finite number".into())
    }

    /// Places a block of a row that begins at a column.
    fn place(&self, block: &SuperBlock, row: usize, column: usize, tiles: &mut [u8]) {
        let parts = block.codes.chunks_exact(BLOCK).take(self.dtype.block_size() / BLOCK);
        for (i, codes) in parts.enumerate() {
            let column = column + i * BLOCK;
            let tile = &mut tiles[column / TILE_COLUMNS * self.tile_bytes()..][..self.tile_bytes()];
            let (places, scales) = tile.split_at_mut(self.code_bytes());
            let inside = column % TILE_COLUMNS;
            for (step, codes) in (inside / 16..).zip(codes.as_chunks().0) {
                self.place_codes(&self.stored(codes), row, step, places);
            }
            for group in 0..self.groups() * BLOCK / TILE_COLUMNS {
                let from = i * BLOCK / self.group() + group;
                self.place_scale(block, from, row, inside / self.group() + group, scales);
            }
        }
    }

    /// The codes as a device has them. Those of floats of four bits rise with the values on the
    /// CPU, and begin with their sign here.
    fn stored(&self, codes: &[u8; 16]) -> [u8; 16] {
        let by_sign = |code: u8| if code < 8 { 15 - code } else { code - 8 };
        if self.is_float() && self.bits() == 4 { codes.map(by_sign) } else { *codes }
    }

    /// Places sixteen codes of a row. A lane has four of them: two neighbours, and the two that are
    /// eight columns further.
    fn place_codes(&self, codes: &[u8; 16], row: usize, step: usize, out: &mut [u8]) {
        let (tile, odd) = (row % 4 / 2, row % 2);
        for t in 0..4 {
            let lane = row / 4 * 4 + t;
            let four = [0, 1, 8, 9].map(|column| u32::from(codes[2 * t + column]));
            if self.bits() == 8 {
                let word = (step * 32 + lane) * 4 + tile * 2;
                merge(out, word, spread(four, odd * 8, None));
                merge(out, word + 1, spread([four[2], four[3], 0, 0], odd * 8, None));
                continue;
            }
            let word = (step / 2 * 32 + lane) * 4 + step % 2 * 2 + tile;
            merge(out, word, spread(four.map(|code| code & 15), odd * 4, Some(8)));
            let high = self.bits() - 4;
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
        if self.scales == DeviceScales::Halves {
            put(block.d, row, &mut scales[at..]);
            if self.minimum {
                put(block.m, row, &mut minimums[at..]);
            }
        } else {
            scales[at + row] = block.scales[from];
            if self.minimum {
                minimums[at + row] = block.mins[from];
            }
        }
    }

    fn place_header(&self, block: &SuperBlock, row: usize, column: usize, headers: &mut [u8]) {
        if self.header_bytes() == 0 {
            return;
        }
        let columns = self.header_columns();
        let header = &mut headers[column / columns * self.header_bytes()..][..self.header_bytes()];
        if self.scales == DeviceScales::Bytes {
            put(block.d, row, header);
            if self.minimum {
                put(block.m, BAND_ROWS + row, header);
            }
            return;
        }
        let group = &mut header[column % columns / self.group() * self.header_group_bytes()..];
        let (scales, zeros) = group.split_at_mut(2 * BAND_ROWS);
        put(f16::from_f32(block.scale * SCALE_FACTOR).to_bits(), row, scales);
        if !self.is_float() {
            zeros[row * self.bits() / 8] |= block.zero << (row * self.bits() % 8);
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
