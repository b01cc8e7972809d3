//! Exchanges between devices: one gathers the parts of all ranks on each, and the kernels of
//! `ranks.cu` add them up or put them side by side.

use super::{AllReduceArgs, GatherColumnsArgs, Ranks};
use crate::gpu::{Launch, Rank, View};
use crate::operand::DeviceOps;
use crate::{Result, args};

const THREADS: usize = 128;

impl Ranks for DeviceOps {
    fn rank(&self) -> Rank {
        (**self).rank()
    }

    fn all_reduce(&self, args: &AllReduceArgs<View>) -> Result<()> {
        let rank = (**self).rank();
        args.check(rank)?;
        let &AllReduceArgs { x, parts } = args;
        if rank == Rank::ALONE || x.is_empty() {
            return Ok(());
        }
        self.all_gather(x, parts)?;
        let kernel = x.kind().kernel("sum_parts_f32", "sum_parts_bf16");
        // The kernel decides by the same rule how many values a thread takes.
        let vector = 16 / x.kind().bytes();
        let each = if x.len().is_multiple_of(vector) { vector } else { 1 };
        let blocks = [x.len().div_ceil(THREADS * each) as u32, 1, 1];
        let launch = Launch { kernel, blocks, threads: THREADS as u32, shared_bytes: 0 };
        self.launch(&launch, &args![parts, x, x.len(), rank.count])
    }

    fn gather_columns(&self, args: &GatherColumnsArgs<View>) -> Result<()> {
        let rank = (**self).rank();
        let [n, at_once] = args.check(rank)?;
        let &GatherColumnsArgs { part, columns, parts, out } = args;
        let (own, most) = (rank.share(columns).len(), rank.largest_share(columns));
        for first in (0..n).step_by(at_once) {
            let rows = at_once.min(n - first);
            let parts = parts.slice(0..rank.count * rows * most);
            self.all_gather(part.slice(first * own..first * own + rows * most), parts)?;
            let blocks = [rows as u32, columns.div_ceil(THREADS) as u32, 1];
            let kernel = "join_columns_f32";
            let launch = Launch { kernel, blocks, threads: THREADS as u32, shared_bytes: 0 };
            let out = out.slice(first * columns..(first + rows) * columns);
            self.launch(&launch, &args![parts, out, rows, columns, most])?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
