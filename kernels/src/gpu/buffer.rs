//! Device memory that is owned.

use super::Gpu;
use super::memory::{DeviceElement, Kind, View};
use crate::Result;
use crate::error::unsupported;
use std::sync::Arc;

/// Device memory of one kind, freed when dropped.
pub struct Buffer {
    gpu: Arc<dyn Gpu>,
    view: View,
}

impl Buffer {
    /// Allocates `len` elements of unspecified content.
    pub fn new(gpu: &Arc<dyn Gpu>, kind: Kind, len: usize) -> Result<Self> {
        let address = gpu.allocate(len * kind.bytes())?;
        Ok(Self { gpu: gpu.clone(), view: View::new(address, len, kind) })
    }

    /// Allocates `len` elements that are zero.
    pub fn zeros(gpu: &Arc<dyn Gpu>, kind: Kind, len: usize) -> Result<Self> {
        let buffer = Self::new(gpu, kind, len)?;
        gpu.fill(buffer.view, 0)?;
        Ok(buffer)
    }

    /// Allocates a copy of host values and waits until it is there.
    pub fn from_slice<T: DeviceElement>(gpu: &Arc<dyn Gpu>, values: &[T]) -> Result<Self> {
        let buffer = Self::new(gpu, T::KIND, values.len())?;
        if !values.is_empty() {
            let mut staging = gpu.staging(buffer.view.bytes())?;
            T::encode(values, staging.bytes_mut());
            gpu.upload(&staging, 0, buffer.view)?;
            gpu.synchronise()?;
        }
        Ok(buffer)
    }

    /// All of its elements. The view must not be used after the buffer was dropped.
    pub fn view(&self) -> View {
        self.view
    }

    /// Reads the values back, once all work given so far is done.
    ///
    /// # Errors
    /// When `T` is not the buffer's kind, or the device fails.
    pub fn to_vec<T: DeviceElement>(&self) -> Result<Vec<T>> {
        if self.view.kind() != T::KIND {
            let detail = format!("{:?} values of a {:?} buffer", T::KIND, self.view.kind());
            return Err(unsupported("read", detail));
        }
        if self.view.is_empty() {
            return Ok(Vec::new());
        }
        let staging = self.gpu.staging(self.view.bytes())?;
        self.gpu.download(self.view, &staging, 0)?;
        self.gpu.synchronise()?;
        Ok(T::decode(staging.bytes()))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.gpu.free(self.view.address());
    }
}
