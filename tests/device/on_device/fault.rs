//! Provokes a fault of a kernel, and tells what the device answers afterwards: whether this process
//! can use it again, and what becomes of another model on it.

use crate::Result;
use crate::targets::{head, row};
use cresset_kernels::Error;
use cresset_kernels::embedding::{Embedding, SelectRowsArgs};
use cresset_kernels::gpu::{Buffer, Gpu, Kind};
use std::fmt::Display;
use std::sync::Arc;

type Opened = cresset_kernels::Result<Arc<dyn Gpu>>;

pub fn fault(open: &dyn Fn() -> Opened) -> Result<()> {
    let (first, other) = (open()?, open()?);
    usable(&first)?;
    let answer = provoke(&first).err().ok_or("a row out of bounds is no fault")?;
    let after = usable(&first).err().ok_or("the device works after a fault")?;
    for error in [&answer, &after] {
        if !matches!(error, Error::DeviceLost { .. }) {
            return Err(format!("a fault of a kernel is not reported as final: {error}").into());
        }
    }
    head();
    row("fault of a kernel", answer, "", &[]);
    row("the next call", after, "", &[]);
    told("another handle of the device", usable(&other));
    told("a handle opened beside it", open().and_then(|gpu| usable(&gpu)));
    drop((first, other));
    told("a handle opened after all were dropped", open().and_then(|gpu| usable(&gpu)));
    Ok(())
}

fn told(what: &str, answer: cresset_kernels::Result<()>) {
    let said: Box<dyn Display> = match answer {
        Ok(()) => Box::new("works"),
        Err(error) => Box::new(error),
    };
    row(what, said, "", &[]);
}

/// Selects a row that the matrix does not have.
fn provoke(gpu: &Arc<dyn Gpu>) -> cresset_kernels::Result<()> {
    let x = Buffer::zeros(gpu, Kind::F32, 8)?;
    let rows = Buffer::from_slice(gpu, &[7u32])?;
    let out = Buffer::zeros(gpu, Kind::F32, 4)?;
    let (x, rows, out) = (x.view(), rows.view(), out.view());
    gpu.select_rows(&SelectRowsArgs { x, width: 4, rows, out })?;
    gpu.synchronise()
}

/// Copies a value to the device and back.
fn usable(gpu: &Arc<dyn Gpu>) -> cresset_kernels::Result<()> {
    Buffer::from_slice(gpu, &[1u32])?.to_vec::<u32>().map(drop)
}
