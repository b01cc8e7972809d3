//! The tensors of a release, taken out by name as an architecture asks for them. Whatever is missing, of another shape or
//! left over is collected and told at the end, all at once.

use super::gguf::GgufFile;
use super::names;
use super::safetensors::Checkpoint;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use cresset_kernels::linear::Weight;
use std::collections::BTreeSet;
use std::path::PathBuf;

pub enum Container<'a> {
    Gguf(&'a GgufFile),
    Checkpoint(&'a Checkpoint),
}

/// A vector that the file may not have.
pub type Optional = Option<Tensor>;

/// Whether an architecture has a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    Never,
    Optional,
    Always,
}

impl Presence {
    pub fn when(flag: bool) -> Self {
        if flag { Self::Always } else { Self::Never }
    }
}

/// How an architecture's files depart from the others'.
#[derive(Clone, Copy, Debug)]
pub struct Spelling {
    /// Modules of a layer that GGUF names otherwise: HF name, GGUF name.
    pub gguf: &'static [(&'static str, &'static str)],
    /// Whether the weights of norms are stored less one.
    pub norms_less_one: bool,
}

pub struct Tensors<'a> {
    container: Container<'a>,
    path: PathBuf,
    dequantise: bool,
    spelling: Spelling,
    taken: BTreeSet<String>,
    problems: Vec<String>,
}

impl<'a> Tensors<'a> {
    pub fn new(container: Container<'a>, path: PathBuf, dequantise: bool, spelling: Spelling) -> Self {
        Self { container, path, dequantise, spelling, taken: BTreeSet::new(), problems: Vec::new() }
    }

    /// A weight matrix by its HF name. `None` is a problem that [`Self::finish`] will tell.
    pub fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Option<Weight> {
        let stored = self.take(name, &[rows, cols])?;
        let weight = match &self.container {
            Container::Gguf(file) => {
                let info = &file.tensors[&stored];
                Weight::from_ggml(info.dtype, file.bytes(info), rows, cols).map_err(Error::from)
            }
            Container::Checkpoint(files) => files.tensor(&stored).and_then(|t| Ok(Weight::from_dense(&t)?)),
        };
        let weight = match weight {
            Ok(weight) if self.dequantise => weight.to_f32().map_err(Error::from),
            other => other,
        };
        self.keep(name, weight)
    }

    /// Matrices of the same width, one below the other.
    pub fn stack(&mut self, parts: &[(&str, usize)], cols: usize) -> Option<Weight> {
        let found: Vec<_> = parts.iter().map(|(name, rows)| self.matrix(name, *rows, cols)).collect();
        let stacked = Weight::stack(found.into_iter().collect::<Option<_>>()?);
        self.keep(parts[0].0, stacked.map_err(Error::from))
    }

    /// A vector in f32.
    pub fn vector(&mut self, name: &str, len: usize) -> Option<Tensor> {
        let stored = self.take(name, &[len])?;
        let vector = match &self.container {
            Container::Gguf(file) => {
                let info = &file.tensors[&stored];
                row_vector(Weight::from_ggml(info.dtype, file.bytes(info), 1, len))
            }
            Container::Checkpoint(files) => files.tensor(&stored).and_then(|t| Ok(t.to_dtype(DType::F32)?)),
        };
        self.keep(name, vector)
    }

    /// The weights of a norm.
    pub fn norm(&mut self, name: &str, len: usize) -> Option<Tensor> {
        let weights = self.vector(name, len)?;
        let whole = if self.spelling.norms_less_one { weights + 1.0 } else { Ok(weights) };
        self.keep(name, whole.map_err(Error::from))
    }

    /// The inner `None` is a vector that may be, and is, absent.
    pub fn vector_if(&mut self, presence: Presence, name: &str, len: usize) -> Option<Optional> {
        match presence {
            Presence::Always => self.vector(name, len).map(Some),
            Presence::Optional if self.has(name) => self.vector(name, len).map(Some),
            Presence::Never | Presence::Optional => Some(None),
        }
    }

    /// Vectors one after the other; all there or all absent.
    pub fn stack_vectors_if(&mut self, presence: Presence, parts: &[(&str, usize)]) -> Option<Optional> {
        let any = parts.iter().any(|(name, _)| self.has(name));
        if presence == Presence::Never || (presence == Presence::Optional && !any) {
            return Some(None);
        }
        let found: Vec<_> = parts.iter().map(|(name, len)| self.vector(name, *len)).collect();
        let found: Vec<Tensor> = found.into_iter().collect::<Option<_>>()?;
        let stacked = Tensor::cat(&found, 0);
        self.keep(parts[0].0, stacked.map_err(Error::from)).map(Some)
    }

    pub fn has(&self, name: &str) -> bool {
        self.shape(&self.stored_name(name)).is_some()
    }

    /// Leaves every stored tensor whose name ends so unused, on purpose.
    pub fn ignore(&mut self, suffix: &str) {
        let ignored: Vec<String> = self.stored_names().filter(|n| n.ends_with(suffix)).map(str::to_owned).collect();
        self.taken.extend(ignored);
    }

    /// All problems, or what was built.
    pub fn finish<T>(mut self, built: Option<T>) -> Result<T> {
        let left: Vec<String> =
            self.stored_names().filter(|n| !self.taken.contains(*n)).map(|n| format!("{n} is left over")).collect();
        self.problems.extend(left);
        match built {
            Some(model) if self.problems.is_empty() => Ok(model),
            _ => Err(Error::BadFile(format!(
                "{}: the tensors do not fit the config: {}; check that all files are of one release, or fetch them again",
                self.path.display(),
                self.problems.join(", ")
            ))),
        }
    }

    /// Marks a tensor as used if it is there with that shape.
    fn take(&mut self, name: &str, shape: &[usize]) -> Option<String> {
        let stored = self.stored_name(name);
        let problem = match self.shape(&stored) {
            Some(found) if found == shape => None,
            Some(found) => Some(format!("{stored} has shape {found:?} instead of {shape:?}")),
            None => Some(format!("{stored} is missing")),
        };
        self.taken.insert(stored.clone());
        let fits = problem.is_none();
        self.problems.extend(problem);
        fits.then_some(stored)
    }

    fn keep<T>(&mut self, name: &str, result: Result<T>) -> Option<T> {
        result.map_err(|e| self.problems.push(format!("{name}: {e}"))).ok()
    }

    fn stored_name(&self, name: &str) -> String {
        match &self.container {
            // Names outside the table are GGUF's own (`rope_freqs.weight`).
            Container::Gguf(_) => names::gguf(name, self.spelling.gguf).unwrap_or_else(|| name.to_owned()),
            Container::Checkpoint(_) => name.to_owned(),
        }
    }

    fn stored_names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        match &self.container {
            Container::Gguf(file) => Box::new(file.tensors.keys().map(String::as_str)),
            Container::Checkpoint(files) => Box::new(files.names()),
        }
    }

    fn shape(&self, stored: &str) -> Option<&[usize]> {
        match &self.container {
            Container::Gguf(file) => file.tensors.get(stored).map(|info| &info.shape[..]),
            Container::Checkpoint(files) => files.shape(stored),
        }
    }
}

fn row_vector(row: cresset_kernels::Result<Weight>) -> Result<Tensor> {
    let row = row?;
    let mut values = vec![0.0; row.cols()];
    row.row_f32(0, &mut values);
    Ok(Tensor::from_vec(values, row.cols(), &Device::Cpu)?)
}
