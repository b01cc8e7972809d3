//! The algorithm that measured fastest for each shape of product. Algorithms round differently, so
//! whoever proves a model keeps its choices with the proof, and hands them to every device that is
//! opened for it.

use super::Properties;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// An algorithm in the library's own opaque form.
pub(super) type MatmulAlgorithm = [u64; 8];

const FILE_HEADER: &str = "cresset products 1";
/// Words of a shape as it is written down.
const SHAPE_WORDS: usize = 7;

/// The algorithms that were chosen, by shape, for devices of one kind with one version of driver
/// and library. Clones share them: what one device measures, the others take.
#[derive(Clone, Debug, Default)]
pub struct ProductChoices(Arc<Mutex<BTreeMap<String, MatmulAlgorithm>>>);

impl ProductChoices {
    /// The choices that were written down as [`Self::lines`] gives them. Other lines are passed
    /// over.
    pub fn of<'a>(lines: impl IntoIterator<Item = &'a str>) -> Self {
        let choices = Self::default();
        choices.take(lines);
        choices
    }

    /// Adds choices to those that are here.
    pub fn take<'a>(&self, lines: impl IntoIterator<Item = &'a str>) {
        self.chosen().extend(lines.into_iter().filter_map(decode_line));
    }

    /// A line for each shape with its algorithm: what a proof keeps.
    pub fn lines(&self) -> BTreeSet<String> {
        self.chosen().iter().map(encode_line).collect()
    }

    /// Adds the choices of the file that a folder has for devices with these properties, if it has
    /// one and that is whole.
    pub fn read_from(&self, folder: &Path, properties: &Properties) {
        let text = std::fs::read_to_string(file(folder, properties)).unwrap_or_default();
        self.take(checked(&text).unwrap_or_default().lines());
    }

    /// Writes that file.
    ///
    /// # Errors
    /// When the folder or the file cannot be written.
    pub fn write_to(&self, folder: &Path, properties: &Properties) -> std::io::Result<()> {
        let lines: String = self.lines().into_iter().map(|line| line + "\n").collect();
        std::fs::create_dir_all(folder)?;
        let text = format!("{FILE_HEADER} {:016x}\n{lines}", digest(&lines));
        std::fs::write(file(folder, properties), text)
    }

    pub(super) fn chosen(&self) -> MutexGuard<'_, BTreeMap<String, MatmulAlgorithm>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn file(folder: &Path, properties: &Properties) -> PathBuf {
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' };
    let name: String =
        format!("{} {}", properties.name, properties.versions).chars().map(plain).collect();
    folder.join(format!("products-{name}.txt"))
}

fn encode_line((shape, algorithm): (&String, &MatmulAlgorithm)) -> String {
    let mut line = shape.clone();
    for word in algorithm {
        let _ = write!(line, " {word:016x}");
    }
    line
}

/// The lines of a file, if its header has their digest.
fn checked(text: &str) -> Option<&str> {
    let (header, lines) = text.split_once('\n')?;
    (header == format!("{FILE_HEADER} {:016x}", digest(lines))).then_some(lines)
}

fn decode_line(line: &str) -> Option<(String, MatmulAlgorithm)> {
    let words: Vec<&str> = line.split(' ').collect();
    let (shape, algorithm) = words.split_at_checked(SHAPE_WORDS)?;
    let algorithm: Option<Vec<u64>> =
        algorithm.iter().map(|word| u64::from_str_radix(word, 16).ok()).collect();
    Some((shape.join(" "), algorithm?.try_into().ok()?))
}

/// FNV-1a. It finds torn files and is no protection against intent.
fn digest(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::{Emulator, Gemm, gemm_shape::GemmShape};

    /// A product, as it was written down in 0.2.0 too.
    const LINE: &str = "bf16 bf16 0 8 5 12 8 0000000000000002 0000000000000000 0000000000000000 \
                        0000000000000000 0000000000000000 0000000000000000 0000000000000000 \
                        000000000000001f";

    #[test]
    fn choices_are_read_as_they_were_written() {
        let choices = ProductChoices::of([LINE]);
        assert_eq!(choices.lines(), [LINE.to_owned()].into());
        let longer = format!("{LINE} 0");
        // What records held before policy 11, a torn line, and no number.
        let other =
            ["0123456789abcdef", &LINE[..60], &longer, &LINE.replace("1f", "1g"), &LINE[5..], ""];
        assert_eq!(ProductChoices::of(other).lines(), BTreeSet::new());
    }

    #[test]
    fn a_file_of_choices_counts_as_a_whole_or_not_at_all() {
        let folder = std::env::temp_dir().join(format!("cresset-products-{}", std::process::id()));
        let card = Emulator::card("h200", 1 << 30).unwrap();
        let properties = Properties { versions: "driver 580 CUDA 13.0".into(), ..card };
        let found = |properties: &Properties| {
            let choices = ProductChoices::default();
            choices.read_from(&folder, properties);
            choices.lines()
        };
        assert_eq!(found(&properties), BTreeSet::new(), "there is no file");
        ProductChoices::of([LINE]).write_to(&folder, &properties).unwrap();
        let file = std::fs::read_dir(&folder).unwrap().next().unwrap().unwrap().path();
        assert!(file.ends_with("products-emulator-driver-580-CUDA-13.0.txt"), "{file:?}");
        let whole = format!("cresset products 1 4113b5144981913a\n{LINE}\n");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), whole, "as 0.2.0 wrote it");
        assert_eq!(found(&properties), [LINE.to_owned()].into());
        let other = Properties { versions: "driver 590 CUDA 13.0".into(), ..properties.clone() };
        assert_eq!(found(&other), BTreeSet::new(), "it is another driver's");
        for damaged in [&whole.replace("0002", "0003"), &whole[..whole.len() / 2], ""] {
            std::fs::write(&file, damaged).unwrap();
            assert_eq!(found(&properties), BTreeSet::new());
        }
        std::fs::remove_file(&file).unwrap();
        std::fs::create_dir(&file).unwrap();
        assert!(ProductChoices::of([LINE]).write_to(&folder, &properties).is_err());
        std::fs::remove_dir_all(&folder).unwrap();
    }

    /// Ranks measure the same shapes at the same time.
    #[test]
    fn the_first_of_two_measurements_counts() {
        let gpu = Emulator::new();
        let x = crate::gpu::Buffer::zeros(&gpu, crate::gpu::Kind::F32, 16).unwrap().view();
        let shape = GemmShape::of(&Gemm::contiguous(x, x, x, [4, 4, 4]));
        let (choices, [first, second, third]) =
            (ProductChoices::default(), [1, 2, 3].map(|n| [n; 8]));
        assert_eq!(choices.get(&shape), None);
        assert_eq!(choices.keep(&shape, None, first), first);
        assert_eq!(choices.clone().keep(&shape, None, second), first);
        // One that does not fit is replaced once.
        assert_eq!(choices.keep(&shape, Some(first), second), second);
        assert_eq!(choices.keep(&shape, Some(first), third), second);
        assert_eq!(choices.get(&shape), Some(second));
    }
}
