//! The arguments of exchanges between ranks.

use crate::Result;
use crate::error::ensure;
use crate::gpu::{Kind, Rank};
use crate::operand::{Operand, distinct, is_activation};

pub(super) const REDUCE: &str = "all_reduce";
pub(super) const COLUMNS: &str = "gather_columns";

/// `x = x of rank 0 + x of rank 1 + …` on every rank, in place. It is summed in f32 in the order of
/// the ranks and rounded once, so all ranks get the same bits, whatever other values there are.
#[derive(Clone, Copy, Debug)]
pub struct AllReduceArgs<V> {
    /// Activations (f32 or, on a device, bf16); equally many on every rank.
    pub x: V,
    /// `[ranks, x.len()]` of the same kind: memory for what the ranks add up. It shares none with
    /// `x`.
    pub parts: V,
}

/// `out = [part of rank 0 | part of rank 1 | …]` on every rank. Rank r has the columns
/// [`Rank::share`] of all.
#[derive(Clone, Copy, Debug)]
pub struct GatherColumnsArgs<V> {
    /// `[n, own columns]` f32 and behind them unused values, of which there are as many in all as
    /// in `[n, Rank::largest_share(columns)]`.
    pub part: V,
    pub columns: usize,
    /// f32 memory for the parts of some rows at a time, at least for one:
    /// `[ranks, rows, Rank::largest_share(columns)]`. It shares none with the others.
    pub parts: V,
    /// `[n, columns]` f32; it shares no memory with `part`.
    pub out: V,
}

impl<V: Operand> AllReduceArgs<V> {
    pub(super) fn check(&self, rank: Rank) -> Result<()> {
        let &Self { x, parts } = self;
        let fits = is_activation(x.kind())
            && parts.kind() == x.kind()
            && parts.len() == rank.count * x.len();
        ensure(REDUCE, fits, || format!("{x:?} of {} ranks in {parts:?}", rank.count))?;
        if x.is_empty() { Ok(()) } else { distinct(REDUCE, x, &[parts]) }
    }
}

impl<V: Operand> GatherColumnsArgs<V> {
    /// Returns the numbers of rows: all, and those whose parts have room at a time.
    pub(super) fn check(&self, rank: Rank) -> Result<[usize; 2]> {
        let &Self { part, columns, parts, out } = self;
        let most = rank.largest_share(columns);
        ensure(COLUMNS, columns > 0, || "no columns".into())?;
        let (rows, at_once) = (out.len() / columns, parts.len() / (rank.count * most));
        let fits = [part, parts, out].iter().all(|view| view.kind() == Kind::F32)
            && out.len() == rows * columns
            && part.len() == rows * most
            && at_once > 0;
        ensure(COLUMNS, fits, || {
            format!("{columns} columns of {} ranks: {part:?}, {parts:?}, {out:?}", rank.count)
        })?;
        if rows > 0 {
            distinct(COLUMNS, out, &[part, parts])?;
            distinct(COLUMNS, parts, &[part])?;
        }
        Ok([rows, at_once])
    }
}
