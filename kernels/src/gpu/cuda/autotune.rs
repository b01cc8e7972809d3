//! Which algorithm a product of some shape takes: measured once, then kept in a file that belongs
//! to one device and one version of driver and library. A file that is not whole is as good as
//! none.

use crate::gpu::{Gemm, Kind, Properties, View};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// An algorithm as the library describes it to itself.
pub type Algorithm = [u64; 8];

/// What a choice holds for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    pub operands: Kind,
    pub out: Kind,
    pub bias: bool,
    /// Rows of x, rounded up to a power of two.
    pub n: usize,
    pub rows: usize,
    pub cols: usize,
    /// Of the least aligned operand, bytes.
    pub alignment: usize,
}

/// Alignment beyond this makes no difference to an algorithm.
const MOST_ALIGNED: u64 = 16;
const HEAD: &str = "cresset products 1";

impl Shape {
    pub fn of(gemm: &Gemm) -> Self {
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
            addresses.into_iter().chain(strides).fold(MOST_ALIGNED, |all, value| all | value);
        Self {
            operands: kind,
            out: gemm.out.kind(),
            bias: gemm.bias.is_some(),
            n: gemm.n.next_power_of_two(),
            rows: gemm.rows,
            cols: gemm.cols,
            alignment: 1 << every_bit.trailing_zeros(),
        }
    }

    fn words(&self) -> String {
        let Self { operands, out, bias, n, rows, cols, alignment } = self;
        format!(
            "{} {} {} {n} {rows} {cols} {alignment}",
            operands.suffix(),
            out.suffix(),
            u8::from(*bias)
        )
    }
}

/// Choices by the words of their shape.
pub struct Choices {
    file: Option<PathBuf>,
    chosen: BTreeMap<String, Algorithm>,
}

impl Choices {
    /// Those kept in `folder` for this device; without a folder they are kept nowhere.
    pub fn open(folder: Option<&Path>, properties: &Properties) -> Self {
        let file = folder.map(|folder| folder.join(file_name(properties)));
        let text = file.as_ref().and_then(|file| std::fs::read_to_string(file).ok());
        Self { chosen: text.and_then(|text| decode(&text)).unwrap_or_default(), file }
    }

    pub fn get(&self, shape: &Shape) -> Option<Algorithm> {
        self.chosen.get(&shape.words()).copied()
    }

    pub fn keep(&mut self, shape: &Shape, algorithm: Algorithm) {
        self.chosen.insert(shape.words(), algorithm);
        if let Some(file) = &self.file {
            // Not written, it is measured again at the next start.
            let _ = replace(file, &encode(&self.chosen));
        }
    }
}

/// Readers see the whole old file or the whole new one.
fn replace(file: &Path, text: &str) -> std::io::Result<()> {
    std::fs::create_dir_all(file.parent().unwrap_or(Path::new(".")))?;
    let scratch = file.with_extension(format!("{}.new", std::process::id()));
    std::fs::write(&scratch, text)?;
    std::fs::rename(&scratch, file)
}

fn file_name(properties: &Properties) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' };
    let name: String =
        format!("{} {}", properties.name, properties.versions).chars().map(plain).collect();
    format!("products-{name}.txt")
}

/// A line with a digest of the rest, then one line a choice.
fn encode(chosen: &BTreeMap<String, Algorithm>) -> String {
    let mut lines = String::new();
    for (shape, algorithm) in chosen {
        lines.push_str(shape);
        for word in algorithm {
            let _ = write!(lines, " {word:016x}");
        }
        lines.push('\n');
    }
    format!("{HEAD} {:016x}\n{lines}", digest(&lines))
}

fn decode(text: &str) -> Option<BTreeMap<String, Algorithm>> {
    let (head, lines) = text.split_once('\n')?;
    if head != format!("{HEAD} {:016x}", digest(lines)) {
        return None;
    }
    lines.lines().map(decode_line).collect()
}

fn decode_line(line: &str) -> Option<(String, Algorithm)> {
    let words: Vec<&str> = line.split(' ').collect();
    let (shape, algorithm) = words.split_at_checked(words.len().checked_sub(8)?)?;
    let algorithm: Option<Vec<u64>> =
        algorithm.iter().map(|word| u64::from_str_radix(word, 16).ok()).collect();
    Some((shape.join(" "), algorithm?.try_into().ok()?))
}

/// FNV-1a: against torn and edited files, not against malice. What it lets through, the library
/// checks before use.
fn digest(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
