//! Weights on a device, dense: every format of the files is widened or rounded to the activations'
//! kind when it is loaded.

use crate::loader::store::{Raw, WeightStore};
use crate::{Error, Result};
use candle_core::quantized::GgmlDType;
use cresset_kernels::Compute;
use cresset_kernels::gpu::{Buffer, DeviceElement, Kind, Staging, StreamEvent, View};
use cresset_kernels::operand::{DeviceOps, MatrixBuffer};
use half::bf16;
use std::sync::OnceLock;

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
    /// Bytes of everything stored.
    pub bytes: usize,
}

/// One of the two pinned buffers, and when its last copy was done.
struct UploadBuffer {
    staging: Staging,
    copied: Option<StreamEvent>,
}

impl DeviceStore {
    /// Makes values of `kind`, f32 or bf16, of matrices and biases.
    pub(super) fn new(gpu: &DeviceOps, kind: Kind, compute: Compute) -> Result<Self> {
        let half =
            || Ok::<_, Error>(UploadBuffer { staging: gpu.staging(STAGING_BYTES)?, copied: None });
        Ok(Self { gpu: gpu.clone(), kind, compute, halves: [half()?, half()?], next: 0, bytes: 0 })
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

impl WeightStore<DeviceOps> for DeviceStore {
    fn matrix(&mut self, parts: &[Raw]) -> Result<MatrixBuffer> {
        let (kind, cols) = (self.kind, parts.first().map_or(0, |part| part.cols));
        let rows = parts.iter().map(|part| part.rows).sum();
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
        Ok(MatrixBuffer { values: whole, rows, cols })
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

fn convert_rows(rows: &Raw, kind: Kind, out: &mut [u8]) -> Result<()> {
    match (rows.dtype, kind) {
        (GgmlDType::BF16, Kind::Bf16) | (GgmlDType::F32, Kind::F32) => {
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
