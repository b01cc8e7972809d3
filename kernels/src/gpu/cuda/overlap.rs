//! Finds out whether kernels may overlap (programmatic dependent launch) on this device with this
//! driver, when the device is opened: the results of launches that overlap are compared with those
//! of launches that do not.

use crate::Result;
use crate::gpu::{Buffer, Gemm, Gpu, Kind, failed};
use crate::norm::{Norm, NormArgs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Launches in the chain. Each reads the output of the previous one.
const LINKS: usize = 24;
const ROWS: usize = 64;
const WIDTH: usize = 128;

/// Allows launches to overlap if a chain of overlapping launches, both launched and recorded as a
/// graph, has the same results as one that does not overlap. `overlapped` is what allows it.
pub(super) fn check(gpu: &Arc<dyn Gpu>, overlapped: &AtomicBool) -> Result<()> {
    let chain = LaunchChain::new(gpu)?;
    let want = chain.results(&mut || chain.run())?;
    overlapped.store(true, Ordering::Relaxed);
    let launched = chain.results(&mut || chain.run())?;
    let graph = gpu.capture(&mut || chain.run())?;
    let replayed = chain.results(&mut || gpu.replay(&graph))?;
    if launched == want && replayed == want {
        return Ok(());
    }
    Err(failed("overlap", "kernels that may overlap give other results"))
}

struct LaunchChain {
    gpu: Arc<dyn Gpu>,
    x: Buffer,
    /// Norms write them in turn, because an output may not be an input as well.
    outs: [Buffer; 2],
    product: Buffer,
    weight: Buffer,
}

impl LaunchChain {
    fn new(gpu: &Arc<dyn Gpu>) -> Result<Self> {
        let zeros = || Buffer::zeros(gpu, Kind::F32, ROWS * WIDTH);
        let weight: Vec<f32> = (0..WIDTH * WIDTH).map(|i| (i % 61) as f32 / 32.0 - 1.0).collect();
        let weight = Buffer::from_slice(gpu, &weight)?;
        Ok(Self {
            x: zeros()?,
            outs: [zeros()?, zeros()?],
            product: zeros()?,
            weight,
            gpu: gpu.clone(),
        })
    }

    /// The bits of all buffers after `work`, which starts from the same content each time.
    fn results(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Vec<u32>> {
        let Self { x, outs: [first, second], product, .. } = self;
        for buffer in [x, second, product] {
            self.gpu.fill(buffer.view(), 0)?;
        }
        self.gpu.copy(self.weight.view().slice(0..ROWS * WIDTH), first.view())?;
        work()?;
        let mut bits = Vec::new();
        for buffer in [x, first, second, product] {
            bits.extend(buffer.to_vec::<f32>()?.into_iter().map(f32::to_bits));
        }
        Ok(bits)
    }

    /// Runs norms, each of a sum with the last result, with products between them, as in a model.
    fn run(&self) -> Result<()> {
        let (x, product, w) = (self.x.view(), self.product.view(), self.weight.view());
        let (outs, weight) = (self.outs.each_ref().map(Buffer::view), w.slice(0..WIDTH));
        let mut last = outs[0];
        for link in 0..LINKS {
            let out = outs[(link + 1) % 2];
            self.gpu.norm(&NormArgs {
                x,
                delta: Some(last),
                weight,
                eps: 1e-5,
                out,
                rounded: None,
            })?;
            last = out;
            if link % 8 == 4 {
                let sizes = [ROWS, WIDTH, WIDTH];
                self.gpu.gemm(&Gemm::contiguous(last, w, product, sizes))?;
                last = product;
            }
        }
        Ok(())
    }
}
