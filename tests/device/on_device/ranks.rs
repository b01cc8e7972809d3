//! Exchanges between all GPUs of the machine, each with a thread of its own: that every rank gets
//! the sum of all, in launches and recorded, and how long it takes. One GPU shows that NCCL is
//! found and answers.

use crate::Result;
use crate::targets::{head, row};
use cresset_kernels::gpu::{Buffer, Gpu, Rank};
use cresset_kernels::ranks::{AllReduceArgs, Ranks};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

/// Values of an exchange: a row of activations of Llama 3.1 8B, and 512 of them.
const SIZES: [(&str, usize); 2] = [("1 row", 4096), ("512 rows", 512 * 4096)];
/// Exchanges that are timed.
const TIMED: usize = 100;

pub fn ranks(gpus: &[Arc<dyn Gpu>]) -> Result<()> {
    head();
    row("ranks", gpus.len(), "", &[]);
    for (name, len) in SIZES {
        let exchanged: Vec<_> = thread::scope(|scope| {
            let ranks: Vec<_> =
                gpus.iter().map(|gpu| scope.spawn(move || exchange(gpu, len))).collect();
            ranks.into_iter().map(|rank| rank.join().map_err(|_| "a rank panicked")).collect()
        });
        let mut slowest = 0f64;
        for seconds in exchanged {
            slowest = slowest.max(seconds??);
        }
        row(format!("exchange of {name}"), format!("{:.1} µs", slowest * 1e6), "", &[]);
    }
    Ok(())
}

/// Adds up other powers of two of every rank, and measures recorded exchanges of zeros. Returns the
/// seconds of one.
fn exchange(gpu: &Arc<dyn Gpu>, len: usize) -> cresset_kernels::Result<f64> {
    let rank = gpu.rank();
    let outcome = (|| {
        let own = Buffer::from_slice(gpu, &vec![(1 << rank.number) as f32; len])?;
        let parts = Buffer::new(gpu, own.view().kind(), rank.count * len)?;
        let args = AllReduceArgs { x: own.view(), parts: parts.view() };
        gpu.all_gather(own.view(), parts.view())?;
        for (number, part) in parts.to_vec::<f32>()?.chunks(len).enumerate() {
            let sent = (1 << number) as f32;
            assert!(part.iter().all(|value| *value == sent), "{rank} has {:?}", &part[..4]);
        }
        gpu.all_reduce(&args)?;
        let sum = ((1u64 << rank.count) - 1) as f32;
        let found = own.to_vec::<f32>()?;
        assert!(found.iter().all(|value| *value == sum), "{rank} has {:?}", &found[..4]);
        gpu.fill(own.view(), 0)?;
        // One rank has nothing to add up.
        let graph = gpu.capture(&mut || match rank {
            Rank::ALONE => gpu.all_gather(own.view(), parts.view()),
            _ => gpu.all_reduce(&args),
        })?;
        gpu.replay(&graph)?;
        gpu.synchronise()?;
        let began = Instant::now();
        (0..TIMED).try_for_each(|_| gpu.replay(&graph))?;
        gpu.synchronise()?;
        assert!(own.to_vec::<f32>()?.iter().all(|value| *value == 0.0), "{rank}: zeros");
        Ok(began.elapsed().as_secs_f64() / TIMED as f64)
    })();
    if let Err(error) = &outcome {
        gpu.abandon(&format!("{rank} failed: {error}"));
    }
    outcome
}
