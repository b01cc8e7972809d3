//! Weights on a device. Beside activations in bf16, block-quantised matrices stay quantised, in the
//! packed form of their format, where it has one. All others are widened or rounded to the
//! activations' kind when they are loaded.

use crate::loader::store::{Raw, WeightStore};
use crate::{Error, Result};
use cresset_kernels::Compute;
use cresset_kernels::gpu::{Buffer, DeviceElement, Kind, Staging, StreamEvent, View};
use cresset_kernels::linear::WeightType;
use cresset_kernels::linear::gpu::{GATHERED_ROWS, SCRATCH_BYTES};
use cresset_kernels::linear::{BAND_ROWS, DeviceFormat};
use cresset_kernels::operand::{
    ColumnsBuffer, DeviceOps, MOST_PARTS, MatrixBuffer, MatrixPart, RoundedInputs,
};
use half::bf16;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// Bytes of each of the two pinned buffers. No row of a matrix is longer.
const STAGING_BYTES: usize = 64 << 20;
/// Bytes that one task of a conversion writes, roughly.
const TASK_BYTES: usize = 1 << 20;

/// While one buffer is copied to the device, all threads fill the other one straight from the
/// bytes that were read.
pub(super) struct DeviceStore {
    gpu: DeviceOps,
    kind: Kind,
    compute: Compute,
    halves: [UploadBuffer; 2],
    next: usize,
    /// Whether steps may be so large that weights are dequantised for them.
    dequantises: bool,
    /// The memory for that, which all packed matrices share. It is there once one needs it.
    scratch: Option<Arc<Buffer>>,
    /// The memory for inputs in the order of columns, shared by all matrices with equally many
    /// columns.
    gathered: SharedRows,
    /// That for inputs rounded to eight bits.
    rounded: SharedRows,
    /// Bytes of everything stored.
    pub bytes: usize,
}

/// Memory for rows of inputs in bf16, by their columns.
struct SharedRows {
    /// How many.
    rows: usize,
    by_columns: BTreeMap<usize, Arc<Buffer>>,
}

impl SharedRows {
    fn new(rows: usize) -> Self {
        Self { rows, by_columns: BTreeMap::new() }
    }

    fn of(&mut self, gpu: &DeviceOps, cols: usize) -> Result<Arc<Buffer>> {
        if !self.by_columns.contains_key(&cols) {
            let buffer = Buffer::new(gpu, Kind::Bf16, self.rows * cols)?;
            self.by_columns.insert(cols, Arc::new(buffer));
        }
        Ok(self.by_columns[&cols].clone())
    }
}

/// One of the two pinned buffers, and when its last copy was done.
struct UploadBuffer {
    staging: Staging,
    copied: Option<StreamEvent>,
}

impl DeviceStore {
    /// Keeps weights for activations of `kind`, f32 or bf16. `dequantises`: whether steps may be so
    /// large that packed weights are dequantised for them. `rounded_rows`: rows for which there is
    /// memory where products with weights of E4M3 round activations to eight bits; 0 if none do.
    pub(super) fn new(
        gpu: &DeviceOps,
        kind: Kind,
        compute: Compute,
        dequantises: bool,
        rounded_rows: usize,
    ) -> Result<Self> {
        let half =
            || Ok::<_, Error>(UploadBuffer { staging: gpu.staging(STAGING_BYTES)?, copied: None });
        let halves = [half()?, half()?];
        Ok(Self {
            gpu: gpu.clone(),
            kind,
            compute,
            halves,
            next: 0,
            dequantises,
            scratch: None,
            gathered: SharedRows::new(GATHERED_ROWS),
            rounded: SharedRows::new(rounded_rows),
            bytes: 0,
        })
    }

    fn buffer(&mut self, kind: Kind, len: usize) -> Result<Buffer> {
        self.bytes += len * kind.bytes();
        Ok(Buffer::new(&self.gpu, kind, len)?)
    }

    fn upload(
        &mut self,
        to: View,
        fill: impl FnOnce(&Compute, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let half = &mut self.halves[self.next];
        self.next = 1 - self.next;
        if let Some(copied) = half.copied.take() {
            self.gpu.wait(&copied)?;
        }
        fill(&self.compute, &mut half.staging.bytes_mut()[..to.bytes()])?;
        self.gpu.upload(&half.staging, 0, to)?;
        half.copied = Some(self.gpu.record()?);
        Ok(())
    }

    fn vector(&mut self, kind: Kind, values: &[f32]) -> Result<Buffer> {
        let buffer = self.buffer(kind, values.len())?;
        self.upload(buffer.view(), |_, out| {
            encode(kind, values, out);
            Ok(())
        })?;
        Ok(buffer)
    }
}

/// Matrices that lie one below the other in one form.
#[derive(Debug, PartialEq, Eq)]
struct Run {
    /// Which of the matrices.
    parts: Range<usize>,
    rows: usize,
    /// `None`: they are dense.
    format: Option<DeviceFormat>,
}

impl Run {
    fn bytes(&self, cols: usize, kind: Kind) -> usize {
        match self.format {
            Some(format) => format.bytes(self.rows, cols),
            None => self.rows * cols * kind.bytes(),
        }
    }
}

/// The order of the columns of all matrices of a stack, if it is one and kernels can follow it.
fn common_order<'a>(parts: &[Raw<'a>]) -> Option<&'a Arc<[u32]>> {
    let order = parts.first()?.order?;
    let follows = |part: &Raw| part.order == Some(order) && DeviceFormat::of(part.dtype).is_some();
    parts.iter().all(follows).then_some(order)
}

/// The forms in which a stack of matrices is kept beside activations of `kind`.
fn runs(parts: &[Raw], kind: Kind) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    let ordered = common_order(parts).is_some();
    for (i, part) in parts.iter().enumerate() {
        // Matrices whose columns are in different orders are widened, to the order of the inputs.
        let in_order = kind == Kind::Bf16 && (ordered || part.order.is_none());
        let format = DeviceFormat::of(part.dtype).filter(|_| in_order);
        match runs.last_mut() {
            // Bands do not reach from one matrix into the next.
            Some(last)
                if last.format == format
                    && (format.is_none() || last.rows.is_multiple_of(BAND_ROWS)) =>
            {
                last.rows += part.rows;
                last.parts.end = i + 1;
            }
            _ => runs.push(Run { parts: i..i + 1, rows: part.rows, format }),
        }
    }
    if runs.len() > MOST_PARTS { vec![dense(parts)] } else { runs }
}

fn dense(parts: &[Raw]) -> Run {
    Run { parts: 0..parts.len(), rows: parts.iter().map(|part| part.rows).sum(), format: None }
}

/// The form in which the matrices of experts are kept. Kernels find each by its number, so all are
/// of one form, and begin with a band.
fn expert_runs(parts: &[Raw], kind: Kind) -> Vec<Run> {
    let runs = runs(parts, kind);
    let found = |part: &Raw| part.order.is_none() && part.rows.is_multiple_of(BAND_ROWS);
    if runs.len() == 1 && parts.iter().all(found) { runs } else { vec![dense(parts)] }
}

fn bytes(parts: &[Raw], runs: &[Run], kind: Kind) -> usize {
    let cols = parts.first().map_or(0, |part| part.cols);
    runs.iter().map(|run| run.bytes(cols, kind)).sum()
}

/// The bytes that a stack of matrices takes beside activations of `kind`.
pub(crate) fn device_bytes(parts: &[Raw], kind: Kind) -> usize {
    bytes(parts, &runs(parts, kind), kind)
}

/// The bytes that the matrices of experts take.
pub(crate) fn expert_bytes(parts: &[Raw], kind: Kind) -> usize {
    bytes(parts, &expert_runs(parts, kind), kind)
}

impl DeviceStore {
    /// Products with the matrix round activations if `rounds` says so and all codes are of E4M3.
    fn stack(&mut self, parts: &[Raw], runs: &[Run], rounds: bool) -> Result<MatrixBuffer> {
        let cols = parts.first().map_or(0, |part| part.cols);
        let mut scaled_by_rows = true;
        let kept = runs.iter().map(|run| {
            let parts = &parts[run.parts.clone()];
            let values = match &run.format {
                Some(format) => self.packed(parts, run.rows, format, &mut scaled_by_rows)?,
                None => self.widened(parts, run.rows)?,
            };
            Ok(MatrixPart { values, rows: run.rows, format: run.format })
        });
        let kept: Vec<_> = kept.collect::<Result<_>>()?;
        if self.dequantises && self.scratch.is_none() && runs.iter().any(|run| run.format.is_some())
        {
            let len = SCRATCH_BYTES / Kind::Bf16.bytes();
            self.scratch = Some(Arc::new(Buffer::new(&self.gpu, Kind::Bf16, len)?));
        }
        let packed = runs.iter().all(|run| run.format.is_some());
        let order = common_order(parts).filter(|_| packed);
        let order = order.map(|order| self.columns(order)).transpose()?;
        let e4m3 = |run: &Run| run.format.is_some_and(|format| format.is_e4m3());
        let rounded: Option<Result<_>> = (rounds && runs.iter().all(e4m3)).then(|| {
            let memory = self.rounded.of(&self.gpu, cols)?;
            Ok(RoundedInputs { memory, scaled_by_rows })
        });
        let rounded = rounded.transpose()?;
        Ok(MatrixBuffer { parts: kept, cols, scratch: self.scratch.clone(), order, rounded })
    }

    fn columns(&mut self, order: &[u32]) -> Result<ColumnsBuffer> {
        let inputs = self.buffer(Kind::U32, order.len())?;
        self.upload(inputs.view(), |_, out| {
            u32::encode(order, out);
            Ok(())
        })?;
        let gathered = self.gathered.of(&self.gpu, order.len())?;
        Ok(ColumnsBuffer { inputs, gathered })
    }

    fn widened(&mut self, parts: &[Raw], rows: usize) -> Result<Buffer> {
        let (kind, cols) = (self.kind, parts.first().map_or(0, |part| part.cols));
        let whole = self.buffer(kind, rows * cols)?;
        let mut from = 0;
        for part in parts {
            let most = (STAGING_BYTES / (part.cols * kind.bytes())).max(1);
            for first in (0..part.rows).step_by(most) {
                let piece = part.slice(first, most.min(part.rows - first));
                let to = from + piece.rows * piece.cols;
                self.upload(whole.view().slice(from..to), |compute, out| {
                    convert(compute, &piece, kind, out)
                })?;
                from = to;
            }
        }
        Ok(whole)
    }

    /// Clears `scaled_by_rows` where a row of codes of E4M3 has several scales.
    fn packed(
        &mut self,
        parts: &[Raw],
        rows: usize,
        format: &DeviceFormat,
        scaled_by_rows: &mut bool,
    ) -> Result<Buffer> {
        let cols = parts.first().map_or(0, |part| part.cols);
        let whole = self.buffer(Kind::U8, format.bytes(rows, cols))?;
        let most = (STAGING_BYTES / format.band_bytes(cols).max(1)).max(1) * BAND_ROWS;
        let mut from = 0;
        for part in parts {
            for first in (0..part.rows).step_by(most) {
                let piece = part.slice(first, most.min(part.rows - first));
                let to = from + format.bytes(piece.rows, cols);
                self.upload(whole.view().slice(from..to), |compute, out| {
                    pack(compute, &piece, format, out)?;
                    *scaled_by_rows &= !format.is_e4m3() || format.has_row_scales(out, cols);
                    Ok(())
                })?;
                from = to;
            }
        }
        Ok(whole)
    }
}

impl WeightStore<DeviceOps> for DeviceStore {
    fn matrix(&mut self, parts: &[Raw]) -> Result<MatrixBuffer> {
        self.stack(parts, &runs(parts, self.kind), self.rounded.rows > 0)
    }

    fn experts(&mut self, parts: &[Raw]) -> Result<MatrixBuffer> {
        self.stack(parts, &expert_runs(parts, self.kind), false)
    }

    fn norm(&mut self, values: Vec<f32>) -> Result<Buffer> {
        self.vector(Kind::F32, &values)
    }

    fn bias(&mut self, values: Vec<f32>) -> Result<Buffer> {
        self.vector(self.kind, &values)
    }
}

impl Drop for DeviceStore {
    /// The copies must end before their buffers are freed.
    fn drop(&mut self) {
        if let Err(error) = self.gpu.synchronise() {
            tracing::error!(%error, "weights were not copied to the device");
        }
    }
}

/// Converts a matrix; each task converts some of its rows.
fn convert(compute: &Compute, matrix: &Raw, kind: Kind, out: &mut [u8]) -> Result<()> {
    let row_bytes = matrix.cols * kind.bytes();
    let most = (TASK_BYTES / row_bytes).max(1);
    let failed = OnceLock::new();
    compute.run_chunks(out, most * row_bytes, |start, out| {
        let rows = matrix.slice(start / row_bytes, out.len() / row_bytes);
        if let Err(error) = convert_rows(&rows, kind, out) {
            failed.get_or_init(|| error);
        }
    });
    failed.into_inner().map_or(Ok(()), Err)
}

/// Packs a matrix; each task packs some of its bands.
fn pack(compute: &Compute, matrix: &Raw, format: &DeviceFormat, out: &mut [u8]) -> Result<()> {
    let band_bytes = format.band_bytes(matrix.cols);
    let most = (TASK_BYTES / band_bytes).max(1);
    let failed = OnceLock::new();
    compute.run_chunks(out, most * band_bytes, |start, out| {
        let first = start / band_bytes * BAND_ROWS;
        let rows = (out.len() / band_bytes * BAND_ROWS).min(matrix.rows - first);
        if let Err(error) = format.pack(matrix.slice(first, rows).bytes, matrix.cols, out) {
            failed.get_or_init(|| error);
        }
    });
    failed.into_inner().map_or(Ok(()), |error| Err(error.into()))
}

fn convert_rows(rows: &Raw, kind: Kind, out: &mut [u8]) -> Result<()> {
    match (rows.dtype, kind) {
        (WeightType::BF16, Kind::Bf16) | (WeightType::F32, Kind::F32) if rows.order.is_none() => {
            out.copy_from_slice(rows.bytes);
        }
        _ => encode(kind, &rows.values()?, out),
    }
    Ok(())
}

fn encode(kind: Kind, values: &[f32], out: &mut [u8]) {
    match kind {
        Kind::Bf16 => {
            bf16::encode(&values.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>(), out);
        }
        _ => f32::encode(values, out),
    }
}
