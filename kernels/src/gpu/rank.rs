//! The place of a device among those that compute one model together (tensor parallelism).

use super::View;
use crate::Result;
use crate::error::ensure;
use std::fmt::{self, Display, Formatter};
use std::ops::Range;

/// The number of a device among `count` that compute one model together. Each has a share of every
/// split matrix, and all go through the same steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rank {
    pub number: usize,
    pub count: usize,
}

impl Rank {
    /// The place of a device that computes a model by itself.
    pub const ALONE: Self = Self { number: 0, count: 1 };

    /// The length of the largest share of `len` values.
    pub fn largest_share(self, len: usize) -> usize {
        len.div_ceil(self.count)
    }

    /// Which of `len` values are this rank's. All shares are equally long where the ranks divide
    /// `len`; otherwise the last ones are shorter or empty.
    pub fn share(self, len: usize) -> Range<usize> {
        let most = self.largest_share(len);
        let first = (self.number * most).min(len);
        first..(first + most).min(len)
    }

    /// Checks the views of [`Gpu::all_gather`](super::Gpu::all_gather).
    pub(super) fn check_gather(self, from: View, to: View) -> Result<()> {
        let fits = to.kind() == from.kind() && Some(to.len()) == from.len().checked_mul(self.count);
        ensure("all_gather", fits, || {
            format!("{from:?} of each of {} ranks into {to:?}", self.count)
        })?;
        ensure("all_gather", from.is_empty() || !to.overlaps(from), || {
            "an output shares its memory with another argument".into()
        })
    }
}

impl Display for Rank {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} (of 0 to {})", self.number, self.count - 1)
    }
}

impl Default for Rank {
    fn default() -> Self {
        Self::ALONE
    }
}
