//! Candle tensors as slices: borrows inputs and writes outputs in place.

use crate::element::Stored;
use crate::error::{shape, unsupported};
use crate::operand::TensorView;
use crate::{Error, Result, stored_as_bf16};
use candle_core::{CpuStorage, InplaceOp1, Layout, Storage, StorageRef};
use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::{Deref, Range};

/// A contiguous CPU tensor, borrowed for reading.
pub(crate) struct Data<'a, E> {
    storage: StorageRef<'a>,
    range: Range<usize>,
    element: PhantomData<E>,
}

impl<E: Stored> Deref for Data<'_, E> {
    type Target = [E];

    fn deref(&self) -> &[E] {
        let data = if let Storage::Cpu(storage) = &*self.storage {
            storage.as_slice::<E>().ok()
        } else {
            None
        };
        &data.expect("invariant: `read` found these elements")[self.range.clone()]
    }
}

/// Borrows a contiguous CPU tensor with elements of type `E`.
pub(crate) fn read<'a, E: Stored>(op: &'static str, view: TensorView<'a>) -> Result<Data<'a, E>> {
    let (storage, layout) = view.tensor.storage_and_layout();
    if !matches!(&*storage, Storage::Cpu(storage) if storage.as_slice::<E>().is_ok()) {
        return Err(wrong_type(op, view));
    }
    let range = contiguous(op, layout, view)?;
    Ok(Data { storage, range, element: PhantomData })
}

/// Lets `f` write a contiguous CPU tensor with elements of type `E`, which must not share its
/// storage with a tensor borrowed at the time.
pub(crate) fn write<E: Stored, T>(
    op: &'static str,
    view: TensorView,
    f: impl FnOnce(&mut [E]) -> T,
) -> Result<T> {
    let range = contiguous(op, view.tensor.layout(), view)?;
    let mut result = None;
    let write = |storage: &mut CpuStorage| {
        result = E::of_mut(storage).map(|data| {
            let written = &mut data[range];
            let result = f(written);
            stored_as_bf16::round(written);
            result
        });
    };
    view.tensor.inplace_op1(&InPlace { op, write: Cell::new(Some(write)) })?;
    result.ok_or_else(|| wrong_type(op, view))
}

/// Runs a closure once inside candle's in-place mechanism, which takes ops by shared reference.
struct InPlace<F> {
    op: &'static str,
    write: Cell<Option<F>>,
}

impl<F: FnOnce(&mut CpuStorage)> InplaceOp1 for InPlace<F> {
    fn name(&self) -> &'static str {
        self.op
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        if let Some(write) = self.write.take() {
            write(storage);
        }
        Ok(())
    }
}

/// The place of a view's values in its tensor's storage.
fn contiguous(op: &'static str, layout: &Layout, view: TensorView) -> Result<Range<usize>> {
    let (first, _) = layout
        .contiguous_offsets()
        .ok_or_else(|| shape(op, format!("{:?} is not contiguous", layout.shape())))?;
    let Range { start, end } = view.range();
    Ok(first + start..first + end)
}

/// The error for a tensor of another type or on another device.
pub(crate) fn wrong_type(op: &'static str, view: TensorView) -> Error {
    let (dtype, device) = (view.tensor.dtype(), view.tensor.device());
    unsupported(op, format!("{dtype:?} tensor on {device:?}"))
}
