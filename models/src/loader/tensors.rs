//! The tensors of a release, taken out by name as an architecture asks for them. Every tensor that
//! is missing, has another shape or is left over is collected, and all are reported at the end.

use super::file::Bytes;
use super::gguf::{GgufFile, ShardReaders};
use super::names;
use super::quantised::form::ColumnOrder;
use super::safetensors::Checkpoint;
use super::share::{AxisPart, RankShare, share_of};
use super::store::{Raw, WeightStore};
use crate::spec::{NameMap, Presence};
use crate::{Error, Result};
use cresset_kernels::OpMemory;
use cresset_kernels::linear::WeightType;
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

pub(super) enum Container {
    Gguf(Box<ShardReaders>, GgufFile),
    Checkpoint(Checkpoint),
}

/// A tensor that was read from its file.
pub(super) struct TensorBytes {
    dtype: WeightType,
    bytes: Bytes,
    rows: usize,
    cols: usize,
    order: ColumnOrder,
}

impl TensorBytes {
    pub(super) fn raw(&self) -> Raw<'_> {
        let Self { dtype, ref bytes, rows, cols, ref order } = *self;
        Raw { dtype, bytes, rows, cols, order: order.as_ref() }
    }
}

/// A tensor that the file may lack.
pub(crate) type Optional<T> = Option<T>;

pub struct Tensors<'a, M: OpMemory> {
    pub(super) container: Container,
    pub(super) path: PathBuf,
    pub(super) store: &'a mut dyn WeightStore<M>,
    pub(super) names: NameMap,
    /// The shares of tensors that are taken. All shapes below are those of a share.
    pub(crate) share: RankShare,
    pub(super) taken: BTreeSet<String>,
    pub(super) problems: Vec<String>,
    /// A failure that leaves nothing to compare: a device without memory left, a file that ends
    /// early.
    pub(super) failed: Option<Error>,
    pub(super) reading: Reading,
}

/// The part of the files that is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    Whole,
    /// Names, shapes and types only. Vectors are ones and matrices have no bytes.
    Headers,
}

/// Whether the values of a stored tensor, in their order, are those of the shape: matrices one
/// below the other are their stack, vectors one behind the other the whole, and a vector is a
/// matrix of one row, since llama.cpp's quantiser leaves out outer dimensions of one.
fn has_values_of(found: &[usize], shape: &[usize]) -> bool {
    match (found, shape) {
        (&[ref heights @ .., width], &[rows, cols]) => {
            width == cols && heights.iter().product::<usize>() == rows
        }
        (&[count, width], &[len]) => count * width == len,
        _ => found == shape,
    }
}

impl<M: OpMemory> Tensors<'_, M> {
    /// Takes a weight matrix by its HF name. `None` is a problem that [`Self::finish`] will report.
    pub fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Option<M::Matrix> {
        self.stack(&[(name, rows)], cols)
    }

    /// Takes matrices of the same width, one below the other; a tensor may hold several of them.
    pub fn stack(&mut self, parts: &[(&str, usize)], cols: usize) -> Option<M::Matrix> {
        self.stack_of(parts, cols, parts.len())
    }

    /// The same with `matrices` matrices: the last one stands for those that have no tensor of
    /// their own.
    pub fn stack_of(
        &mut self,
        parts: &[(&str, usize)],
        cols: usize,
        matrices: usize,
    ) -> Option<M::Matrix> {
        let found = self.raws(parts, cols)?;
        let copies = found.last().into_iter().cycle();
        let raws = found.iter().chain(copies).take(matrices).map(TensorBytes::raw);
        let stacked = self.store.matrix(&raws.collect::<Vec<_>>());
        self.keep(parts[0].0, stacked)
    }

    /// Takes a tensor that holds matrices of one width, one below the other: for each the name that
    /// it would have alone.
    pub fn fused(&mut self, name: &str, parts: &[(&str, usize)], cols: usize) -> Option<M::Matrix> {
        let rows: Vec<_> =
            parts.iter().map(|(part, rows)| (*rows, self.share.cut(part).rows)).collect();
        let found = self.raw_of_rows(name, &rows, (cols, AxisPart::WHOLE))?;
        let whole = self.store.matrix(&[found.raw()]);
        self.keep(name, whole)
    }

    /// Takes some rows of a matrix.
    pub fn rows_of(
        &mut self,
        name: &str,
        [rows, cols]: [usize; 2],
        own: Range<usize>,
    ) -> Option<M::Matrix> {
        let found = self.raw(name, &[rows, cols])?;
        let part = self.store.matrix(&[self.part_of(&found.raw(), own)]);
        self.keep(name, part)
    }

    /// Takes a matrix, and some of its rows as another one.
    pub fn matrix_and_rows(
        &mut self,
        name: &str,
        [rows, cols]: [usize; 2],
        own: Range<usize>,
    ) -> Option<(M::Matrix, M::Matrix)> {
        let found = self.raw(name, &[rows, cols])?;
        let whole = self.store.matrix(&[found.raw()]);
        let part = self.store.matrix(&[self.part_of(&found.raw(), own)]);
        self.keep(name, whole).zip(self.keep(name, part))
    }

    /// Some rows of a tensor.
    fn part_of<'r>(&self, raw: &Raw<'r>, rows: Range<usize>) -> Raw<'r> {
        match self.reading {
            Reading::Whole => raw.slice(rows.start, rows.len()),
            Reading::Headers => Raw { rows: rows.len(), ..*raw },
        }
    }

    /// Takes a tensor that holds matrices of one width, one below the other, apart.
    pub fn split<const N: usize>(
        &mut self,
        name: &str,
        parts: [usize; N],
        cols: usize,
    ) -> Option<[M::Matrix; N]> {
        let found = self.raw(name, &[parts.iter().sum(), cols])?;
        let (raw, mut first) = (found.raw(), 0);
        let mut matrices = Vec::with_capacity(N);
        for rows in parts {
            let part = self.part_of(&raw, first..first + rows);
            first += rows;
            let matrix = self.store.matrix(&[part]);
            matrices.push(self.keep(name, matrix)?);
        }
        matrices.try_into().ok()
    }

    pub(super) fn raws(
        &mut self,
        parts: &[(&str, usize)],
        cols: usize,
    ) -> Option<Vec<TensorBytes>> {
        let found: Vec<_> =
            parts.iter().map(|(name, rows)| self.raw(name, &[*rows, cols])).collect();
        found.into_iter().collect()
    }

    /// Takes a vector into the host's memory.
    pub fn numbers(&mut self, name: &str, len: usize) -> Option<Vec<f32>> {
        self.values(name, &[len])
    }

    /// Takes the halves of a matrix of `[rows, 2 * cols]`, left and right, as matrices of their
    /// own.
    pub fn column_halves(
        &mut self,
        name: &str,
        [rows, cols]: [usize; 2],
    ) -> Option<[M::Matrix; 2]> {
        let found = self.raw(name, &[rows, 2 * cols])?;
        let mut half = |part: AxisPart| {
            let bytes = match self.reading {
                Reading::Whole => share_of(&found.raw(), &[(rows, AxisPart::WHOLE)], part),
                Reading::Headers => Ok(Vec::new()),
            };
            let matrix = bytes
                .map_err(Error::Unsupported)
                .and_then(|bytes| self.store.matrix(&[Raw { bytes: &bytes, cols, ..found.raw() }]));
            self.keep(name, matrix)
        };
        let [left, right] = AxisPart::HALVES.map(&mut half);
        Some([left?, right?])
    }

    /// Takes the values of a vector or of a matrix into the host's memory.
    pub(super) fn values(&mut self, name: &str, shape: &[usize]) -> Option<Vec<f32>> {
        let found = self.raw(name, shape)?;
        match self.reading {
            Reading::Whole if self.share.leaves_to_others(name) => {
                Some(vec![0.0; shape.iter().product()])
            }
            Reading::Whole => self.keep(name, found.raw().values()),
            Reading::Headers => Some(vec![1.0; shape.iter().product()]),
        }
    }

    /// Takes the weights of a norm.
    pub fn norm(&mut self, name: &str, len: usize) -> Option<M::Buffer> {
        self.scaled_norm(name, len, 1.0)
    }

    /// Takes the weights of a norm whose results are multiplied by `scale`.
    pub fn scaled_norm(&mut self, name: &str, len: usize, scale: f32) -> Option<M::Buffer> {
        let mut weights = self.numbers(name, len)?;
        let added = if self.names.norms_less_one { 1.0 } else { 0.0 };
        for weight in &mut weights {
            *weight = (*weight + added) * scale;
        }
        let norm = self.store.norm(weights);
        self.keep(name, norm)
    }

    /// The weights of a norm that has none in its file.
    pub fn ones(&mut self, len: usize) -> Option<M::Buffer> {
        let norm = self.store.norm(vec![1.0; len]);
        self.keep("the weights of a norm", norm)
    }

    /// Takes a vector whose values are changed by `map`, in f32.
    pub fn vector(
        &mut self,
        name: &str,
        len: usize,
        map: impl Fn(f32) -> f32,
    ) -> Option<M::Buffer> {
        let values = self.numbers(name, len)?.into_iter().map(map).collect();
        let kept = self.store.norm(values);
        self.keep(name, kept)
    }

    /// Takes the taps of a convolution of each channel, `[channels, taps]`, as `[taps, channels]`
    /// f32.
    pub fn taps(&mut self, name: &str, channels: usize, taps: usize) -> Option<M::Buffer> {
        let values = self.values(name, &[channels, taps])?;
        let tap = |tap: usize| values[tap..].iter().step_by(taps);
        let kept = self.store.norm((0..taps).flat_map(tap).copied().collect());
        self.keep(name, kept)
    }

    /// Takes biases one after the other; all are present or all absent. The inner `None` is a bias
    /// that may be absent, and is.
    pub fn bias_if(
        &mut self,
        presence: Presence,
        parts: &[(&str, usize)],
    ) -> Option<Optional<M::Buffer>> {
        let Some(found) = self.biases(presence, parts)? else { return Some(None) };
        self.bias(parts[0].0, &found).map(Some)
    }

    /// The same in the host's memory, apart.
    pub(super) fn biases(
        &mut self,
        presence: Presence,
        parts: &[(&str, usize)],
    ) -> Option<Optional<Vec<Vec<f32>>>> {
        let any = parts.iter().any(|(name, _)| self.has(name));
        if presence == Presence::Never || (presence == Presence::Optional && !any) {
            return Some(None);
        }
        let found: Vec<_> = parts.iter().map(|(name, len)| self.numbers(name, *len)).collect();
        found.into_iter().collect::<Option<_>>().map(Some)
    }

    /// One bias of several, one after the other.
    pub(super) fn bias(&mut self, name: &str, parts: &[Vec<f32>]) -> Option<M::Buffer> {
        let bias = self.store.bias(parts.concat());
        self.keep(name, bias)
    }

    /// The type in which a tensor is stored, if the file has it.
    pub(super) fn dtype(&self, name: &str) -> Option<WeightType> {
        let stored = self.stored_name(name);
        match &self.container {
            Container::Gguf(_, file) => file.tensors.get(&stored).map(|info| info.dtype),
            Container::Checkpoint(files) => files.dtype(&stored),
        }
    }

    /// Whether the file is a GGUF, whose converter changes some values.
    pub fn is_gguf(&self) -> bool {
        matches!(self.container, Container::Gguf(..))
    }

    pub fn has(&self, name: &str) -> bool {
        self.shape(&self.stored_name(name)).is_some()
    }

    /// Whether a tensor has matrices of this height, which are not as wide.
    pub fn has_heights(&self, name: &str, height: usize) -> bool {
        let shape = self.shape(&self.stored_name(name));
        matches!(shape, Some(&[_, rows, cols]) if rows == height && cols != height)
    }

    /// Leaves every stored tensor whose name ends in `suffix` unused, on purpose.
    pub fn ignore(&mut self, suffix: &str) {
        let ignored = self.stored_names().filter(|n| n.ends_with(suffix));
        self.leave_out(ignored.map(str::to_owned).collect());
    }

    /// Leaves a tensor unused, on purpose, if the file has it.
    pub fn ignore_one(&mut self, name: &str) {
        let stored = self.stored_name(name);
        if self.shape(&stored).is_some() {
            self.leave_out(vec![stored]);
        }
    }

    /// Leaves all tensors of a layer unused, on purpose.
    pub fn ignore_layer(&mut self, layer: usize) {
        self.ignore_below(&match &self.container {
            Container::Gguf(..) => format!("blk.{layer}."),
            Container::Checkpoint(files) => files.stored(&format!("model.layers.{layer}.")),
        });
    }

    /// Leaves every stored tensor whose name begins with `prefix` unused, on purpose.
    pub fn ignore_below(&mut self, prefix: &str) {
        let ignored = self.stored_names().filter(|name| name.starts_with(prefix));
        self.leave_out(ignored.map(str::to_owned).collect());
    }

    /// Leaves the parts of a checkpoint that no text needs unused.
    pub fn ignore_towers(&mut self) {
        let Container::Checkpoint(files) = &self.container else { return };
        let towers = files.towers();
        if !towers.is_empty() {
            let tensors = towers.len();
            tracing::info!(tensors, "the parts that no text needs are left out");
        }
        self.leave_out(towers);
    }

    fn leave_out(&mut self, names: Vec<String>) {
        self.taken.extend(names);
    }

    /// Reads what is left of the files and returns `built`, or an error that lists all problems. A
    /// file with another digest than the release's comes before them: it explains them.
    pub fn finish<T>(mut self, built: Option<T>) -> Result<T> {
        let left: Vec<String> = self
            .stored_names()
            .filter(|n| !self.taken.contains(*n))
            .map(|n| format!("{n} is left over"))
            .collect();
        self.problems.extend(left);
        if let Some(error) = self.failed {
            return Err(error);
        }
        if self.reading == Reading::Whole {
            match self.container {
                Container::Gguf(tensors, _) => tensors.finish()?,
                Container::Checkpoint(files) => files.finish()?,
            }
        }
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
            Some(found) if has_values_of(found, shape) => None,
            Some(found) => Some(format!("{stored} has shape {found:?} instead of {shape:?}")),
            None => Some(format!("{stored} is missing")),
        };
        self.taken.insert(stored.clone());
        let fits = problem.is_none();
        self.problems.extend(problem);
        fits.then_some(stored)
    }

    /// Takes a vector, as one row, or a matrix.
    pub(super) fn raw(&mut self, name: &str, shape: &[usize]) -> Option<TensorBytes> {
        let cut = self.share.cut(name);
        if let [rows, cols] = *shape {
            return self.raw_of_rows(name, &[(rows, cut.rows)], (cols, cut.columns));
        }
        let len = shape.iter().product();
        let found = self.read(name, &[cut.columns.whole(len)])?;
        self.own(name, found, &[(1, cut.rows)], (len, cut.columns))
    }

    /// Takes a matrix. `rows`: how many rows of each of the matrices of which it consists, one
    /// below the other, and which part of that one they are.
    pub(super) fn raw_of_rows(
        &mut self,
        name: &str,
        rows: &[(usize, AxisPart)],
        (cols, columns): (usize, AxisPart),
    ) -> Option<TensorBytes> {
        let all_rows = rows.iter().map(|(len, part)| part.whole(*len)).sum();
        let found = self.read(name, &[all_rows, columns.whole(cols)])?;
        self.own(name, found, rows, (cols, columns))
    }

    /// Cuts a share out of a tensor.
    fn own(
        &mut self,
        name: &str,
        found: TensorBytes,
        rows: &[(usize, AxisPart)],
        (cols, columns): (usize, AxisPart),
    ) -> Option<TensorBytes> {
        let count: usize = rows.iter().map(|(len, _)| len).sum();
        if (count, cols) == (found.rows, found.cols) {
            return Some(found);
        }
        let bytes = self.share_of(name, &found.raw(), rows, columns)?;
        Some(TensorBytes { bytes: Arc::new(bytes), rows: count, cols, ..found })
    }

    /// The bytes of a share of a tensor.
    pub(super) fn share_of(
        &mut self,
        name: &str,
        whole: &Raw,
        rows: &[(usize, AxisPart)],
        columns: AxisPart,
    ) -> Option<Vec<u8>> {
        if self.reading == Reading::Headers {
            return Some(Vec::new());
        }
        match share_of(whole, rows, columns) {
            Ok(bytes) => Some(bytes),
            Err(why) => {
                let (stored, ranks) = (self.stored_name(name), self.share.rank.count);
                self.refuse(&format!(
                    "{ranks} GPUs cannot share {stored}, because {why}: use another number \
                     (engine.tensor_parallel)"
                ));
                None
            }
        }
    }

    /// Reads a tensor of this shape: a vector, as one row, or a matrix.
    pub(super) fn read(&mut self, name: &str, shape: &[usize]) -> Option<TensorBytes> {
        if self.failed.is_some() {
            return None;
        }
        let stored = self.take(name, shape)?;
        let (rows, cols) =
            if let [rows, cols] = *shape { (rows, cols) } else { (1, shape.iter().product()) };
        let whole = self.reading == Reading::Whole;
        let dtype = self.dtype(name)?;
        let bytes = match &mut self.container {
            Container::Gguf(tensors, _) => {
                whole.then(|| tensors.take(&stored).map(|bytes| (bytes, None)))
            }
            Container::Checkpoint(files) => whole.then(|| files.take(&stored)),
        };
        match bytes.unwrap_or_else(|| Ok((Bytes::default(), None))) {
            Ok((bytes, order)) => Some(TensorBytes { dtype, bytes, rows, cols, order }),
            Err(error) => {
                self.failed = Some(error);
                None
            }
        }
    }

    /// Refuses the model for a reason that its tensors have no part in.
    pub fn refuse(&mut self, why: &str) {
        let text = format!("{}: {why}", self.path.display());
        self.failed.get_or_insert(Error::Unsupported(text));
    }

    /// Returns the value, or `None` and records a problem for [`Self::finish`] to report.
    pub fn keep<T>(&mut self, name: &str, result: Result<T>) -> Option<T> {
        match result {
            Ok(kept) => return Some(kept),
            Err(
                error @ Error::Kernel(
                    cresset_kernels::Error::Device { .. }
                    | cresset_kernels::Error::OutOfMemory { .. }
                    | cresset_kernels::Error::DeviceLost { .. }
                    | cresset_kernels::Error::GroupLost { .. },
                ),
            ) => {
                self.failed.get_or_insert(error);
            }
            Err(error) => self.problems.push(format!("{name}: {error}")),
        }
        None
    }

    fn stored_name(&self, name: &str) -> String {
        match &self.container {
            // Names outside the table are GGUF's own (`rope_freqs.weight`).
            Container::Gguf(..) => {
                names::gguf(name, self.names.gguf).unwrap_or_else(|| name.to_owned())
            }
            Container::Checkpoint(files) => {
                let replace = |name: String, (usual, own): &(&str, &str)| name.replace(usual, own);
                files.stored(&self.names.hf.iter().fold(name.to_owned(), replace))
            }
        }
    }

    fn stored_names(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        match &self.container {
            Container::Gguf(_, file) => Box::new(file.tensors.keys().map(String::as_str)),
            Container::Checkpoint(files) => Box::new(files.names()),
        }
    }

    fn shape(&self, stored: &str) -> Option<&[usize]> {
        match &self.container {
            Container::Gguf(_, file) => file.tensors.get(stored).map(|info| &info.shape[..]),
            Container::Checkpoint(files) => files.shape(stored),
        }
    }
}
