//! The CPU computes a model by itself, so it is the only rank.

use super::args::COLUMNS;
use super::{AllReduceArgs, GatherColumnsArgs, Ranks};
use crate::gpu::Rank;
use crate::operand::TensorView;
use crate::storage::{read, write};
use crate::{Compute, Result};

impl Ranks for Compute {
    fn rank(&self) -> Rank {
        Rank::ALONE
    }

    /// There is nothing to add.
    fn all_reduce(&self, args: &AllReduceArgs<TensorView>) -> Result<()> {
        args.check(Rank::ALONE)
    }

    fn gather_columns(&self, args: &GatherColumnsArgs<TensorView>) -> Result<()> {
        args.check(Rank::ALONE)?;
        let part = read::<f32>(COLUMNS, args.part)?;
        write(COLUMNS, args.out, |out: &mut [f32]| out.copy_from_slice(&part))
    }
}
