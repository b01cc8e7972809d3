//! Mixtures of experts: of many MLPs, a router chooses a few for each row (top-k routing), and
//! their results are added up with weights. Shazeer et al. 2017, "Outrageously Large Neural
//! Networks".
//!
//! A choice is a row with one of the experts that were chosen for it. Choices are numbered by row,
//! and within a row by ascending expert; in this order a row's results are added up. So the result
//! of a row does not depend on other rows.

mod args;
mod cpu;
mod gpu;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

pub use args::{
    CombineArgs, ExpertLinearArgs, MAX_CHOSEN, MAX_GROUPS, RouteArgs, RouteScoring, Routes,
    SharedExpert,
};

use crate::Result;
use crate::operand::OpMemory;

pub trait Experts: OpMemory {
    /// Chooses the experts of each row as [`RouteScoring`] says, and of equal ones, as of equal
    /// groups, the one with the smaller number. A row with a score that is NaN or infinite gets
    /// weights that are NaN, so that its logits become NaN and sampling fails it; other rows are
    /// not touched.
    fn route(&self, args: &RouteArgs<Self::View<'_>>) -> Result<()>;

    /// Multiplies each choice's row by the matrix of its expert. An output has the same bits
    /// whatever other choices there are.
    fn expert_linear(&self, args: &ExpertLinearArgs<Self::View<'_>>) -> Result<()>;

    /// Adds up the results of each row's choices.
    fn combine(&self, args: &CombineArgs<Self::View<'_>>) -> Result<()>;
}
