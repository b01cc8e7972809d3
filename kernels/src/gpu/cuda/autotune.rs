//! The algorithm that measured fastest for each shape of product. It is kept in a file that belongs
//! to one device and one version of driver and library. A damaged file is treated as missing.

use crate::gpu::{Gemm, Kind, Properties, View};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// An algorithm in the library's own opaque form.
pub(super) type MatmulAlgorithm = [u64; 8];

/// The properties of a product by which its algorithm is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct GemmShape {
    pub operands: Kind,
    /// The ending of the operands' name that tells how they are scaled.
    pub scaling: &'static str,
    pub out: Kind,
    pub bias: bool,
    /// Rows of x, rounded up to a power of two, so that few shapes are measured.
    pub n: usize,
    pub rows: usize,
    pub cols: usize,
    /// Alignment in bytes of the least aligned operand.
    pub alignment: usize,
}

/// More alignment than this, in bytes, makes no difference to an algorithm.
const MAX_ALIGNMENT: u64 = 16;
const FILE_HEADER: &str = "cresset products 1";

impl GemmShape {
    pub(super) fn of(gemm: &Gemm) -> Self {
        let stride = |view_kind: Kind, stride: usize| (stride * view_kind.bytes()) as u64;
        let addresses = [
            gemm.x.address(),
            gemm.w.address(),
            gemm.out.address(),
            gemm.bias.map_or(0, View::address),
        ];
        let kind = gemm.x.kind();
        let strides = [
            stride(kind, gemm.x_stride),
            stride(kind, gemm.cols),
            stride(gemm.out.kind(), gemm.out_stride),
        ];
        let every_bit =
            addresses.into_iter().chain(strides).fold(MAX_ALIGNMENT, |all, value| all | value);
        let scaling = match gemm.scales {
            None => "",
            Some(_) if gemm.scaled_by_rows() => "-rows",
            Some(_) => "-groups",
        };
        Self {
            operands: kind,
            scaling,
            out: gemm.out.kind(),
            bias: gemm.bias.is_some(),
            n: gemm.n.next_power_of_two(),
            rows: gemm.rows,
            cols: gemm.cols,
            alignment: 1 << every_bit.trailing_zeros(),
        }
    }

    /// The shape as it stands in the file.
    fn key(&self) -> String {
        let Self { operands, scaling, out, bias, n, rows, cols, alignment } = self;
        format!(
            "{}{scaling} {} {} {n} {rows} {cols} {alignment}",
            operands.suffix(),
            out.suffix(),
            u8::from(*bias)
        )
    }
}

/// Algorithms by the key of their shape.
pub(super) struct AutotuneCache {
    file: Option<PathBuf>,
    chosen: BTreeMap<String, MatmulAlgorithm>,
}

impl AutotuneCache {
    /// Reads the algorithms that are kept in `folder` for this device. Without a folder the cache
    /// is in memory only.
    pub(super) fn open(folder: Option<&Path>, properties: &Properties) -> Self {
        let file = folder.map(|folder| folder.join(file_name(properties)));
        let text = file.as_ref().and_then(|file| std::fs::read_to_string(file).ok());
        Self { chosen: text.and_then(|text| decode(&text)).unwrap_or_default(), file }
    }

    pub(super) fn get(&self, shape: &GemmShape) -> Option<MatmulAlgorithm> {
        self.chosen.get(&shape.key()).copied()
    }

    pub(super) fn keep(&mut self, shape: &GemmShape, algorithm: MatmulAlgorithm) {
        self.chosen.insert(shape.key(), algorithm);
        if let Some(file) = &self.file {
            // If it cannot be written, the shape is measured again at the next start.
            let _ = replace(file, &encode(&self.chosen));
        }
    }
}

/// A digest of each shape with the algorithm that is kept for it in this folder for this device.
pub fn chosen_products(folder: &Path, properties: &Properties) -> BTreeSet<String> {
    let chosen = AutotuneCache::open(Some(folder), properties).chosen;
    let one = |(shape, algorithm)| digest(&encode(&BTreeMap::from([(shape, algorithm)])));
    chosen.into_iter().map(|chosen| format!("{:016x}", one(chosen))).collect()
}

/// Replaces the file by renaming, so that readers see the whole old one or the whole new one.
/// Several devices may do so at the same time.
fn replace(file: &Path, text: &str) -> std::io::Result<()> {
    static WRITTEN: AtomicUsize = AtomicUsize::new(0);
    std::fs::create_dir_all(file.parent().unwrap_or(Path::new(".")))?;
    let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
    let scratch = file.with_extension(format!("{}-{number}.new", std::process::id()));
    std::fs::write(&scratch, text)?;
    std::fs::rename(&scratch, file)
}

fn file_name(properties: &Properties) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' };
    let name: String =
        format!("{} {}", properties.name, properties.versions).chars().map(plain).collect();
    format!("products-{name}.txt")
}

/// The file's text: a line with a digest of the rest, then one line for each shape.
fn encode(chosen: &BTreeMap<String, MatmulAlgorithm>) -> String {
    let mut lines = String::new();
    for (shape, algorithm) in chosen {
        lines.push_str(shape);
        for word in algorithm {
            let _ = write!(lines, " {word:016x}");
        }
        lines.push('\n');
    }
    format!("{FILE_HEADER} {:016x}\n{lines}", digest(&lines))
}

fn decode(text: &str) -> Option<BTreeMap<String, MatmulAlgorithm>> {
    let (header, lines) = text.split_once('\n')?;
    if header != format!("{FILE_HEADER} {:016x}", digest(lines)) {
        return None;
    }
    lines.lines().map(decode_line).collect()
}

fn decode_line(line: &str) -> Option<(String, MatmulAlgorithm)> {
    let words: Vec<&str> = line.split(' ').collect();
    let (shape, algorithm) = words.split_at_checked(words.len().checked_sub(8)?)?;
    let algorithm: Option<Vec<u64>> =
        algorithm.iter().map(|word| u64::from_str_radix(word, 16).ok()).collect();
    Some((shape.join(" "), algorithm?.try_into().ok()?))
}

/// FNV-1a. It finds torn and edited files and is no protection against intent; the library checks
/// each algorithm before use anyway.
fn digest(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
