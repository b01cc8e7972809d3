//! The shapes by which products have their algorithms.

use super::products::{MatmulAlgorithm, ProductChoices};
use super::{Gemm, Kind, View};

/// More alignment than this, in bytes, makes no difference to an algorithm.
const MAX_ALIGNMENT: u64 = 16;

/// The properties of a product by which its algorithm is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct GemmShape {
    operands: Kind,
    /// The ending of the operands' name that tells how they are scaled.
    scaling: &'static str,
    out: Kind,
    bias: bool,
    /// Rows of x, rounded up to a power of two, so that few shapes are measured.
    n: usize,
    rows: usize,
    cols: usize,
    /// Alignment in bytes of the least aligned operand.
    pub alignment: usize,
}

impl GemmShape {
    pub(super) fn of(gemm: &Gemm) -> Self {
        let stride = |view_kind: Kind, stride: usize| (stride * view_kind.bytes()) as u64;
        let addresses = [
            gemm.x.address(),
            gemm.w.address(),
            gemm.out.address(),
            gemm.bias.map_or(0, View::address),
        ];
        let kind = gemm.x.kind();
        let strides = [
            stride(kind, gemm.x_stride),
            stride(kind, gemm.cols),
            stride(gemm.out.kind(), gemm.out_stride),
        ];
        let every_bit =
            addresses.into_iter().chain(strides).fold(MAX_ALIGNMENT, |all, value| all | value);
        let scaling = match gemm.scales {
            None => "",
            Some(_) if gemm.scaled_by_rows() => "-rows",
            Some(_) => "-groups",
        };
        Self {
            operands: kind,
            scaling,
            out: gemm.out.kind(),
            bias: gemm.bias.is_some(),
            n: gemm.n.next_power_of_two(),
            rows: gemm.rows,
            cols: gemm.cols,
            alignment: 1 << every_bit.trailing_zeros(),
        }
    }

    /// The shape as it is written down.
    fn key(&self) -> String {
        let Self { operands, scaling, out, bias, n, rows, cols, alignment } = self;
        format!(
            "{}{scaling} {} {} {n} {rows} {cols} {alignment}",
            operands.suffix(),
            out.suffix(),
            u8::from(*bias)
        )
    }
}

impl ProductChoices {
    pub(super) fn get(&self, shape: &GemmShape) -> Option<MatmulAlgorithm> {
        self.chosen().get(&shape.key()).copied()
    }

    /// Keeps what was measured where `before` was chosen, and returns what counts: another device
    /// may have chosen meanwhile.
    pub(super) fn keep(
        &self,
        shape: &GemmShape,
        before: Option<MatmulAlgorithm>,
        measured: MatmulAlgorithm,
    ) -> MatmulAlgorithm {
        let mut chosen = self.chosen();
        let kept = chosen.entry(shape.key()).or_insert(measured);
        if before == Some(*kept) {
            *kept = measured;
        }
        *kept
    }
}
