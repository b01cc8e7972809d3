//! Products with factors on the CPU: a multiplication each, which the compiler vectorises.

use super::args::{CHOICES, INPUT, SCALE};
use super::{ChoiceFactorsArgs, Factors, LayerInputArgs, ScaleArgs};
use crate::activation::gated_row;
use crate::error::ensure;
use crate::experts::Routes;
use crate::operand::{Operand, TensorView};
use crate::simd::Isa;
use crate::storage::{read, write};
use crate::{Compute, Result};

/// With fewer outputs than this, waking a thread costs more than it saves.
const OUTPUTS_PER_TASK: usize = 8 * 1024;

impl Factors for Compute {
    fn scale(&self, args: &ScaleArgs<TensorView>) -> Result<()> {
        args.check()?;
        let factor = read::<f32>(SCALE, args.factor)?[0];
        write(SCALE, args.x, |x: &mut [f32]| {
            self.run_chunks(x, OUTPUTS_PER_TASK, |_, x| x.iter_mut().for_each(|x| *x *= factor));
        })
    }

    fn layer_input(&self, args: &LayerInputArgs<TensorView>) -> Result<()> {
        args.check()?;
        let &LayerInputArgs { activation, stride, first, width, .. } = args;
        let (gate, inputs) = (read::<f32>(INPUT, args.gate)?, read::<f32>(INPUT, args.inputs)?);
        let rows = (OUTPUTS_PER_TASK / width).max(1);
        write(INPUT, args.out, |out: &mut [f32]| {
            self.run_chunks(out, rows * width, |start, out| {
                let gates = gate[start..].chunks_exact(width);
                let inputs = inputs[start / width * stride..].chunks_exact(stride);
                for ((gate, inputs), out) in gates.zip(inputs).zip(out.chunks_exact_mut(width)) {
                    gated_row(Isa::best(), activation, gate, &inputs[first..first + width], out);
                }
            });
        })
    }

    fn choice_factors(&self, args: &ChoiceFactorsArgs<TensorView>) -> Result<()> {
        args.check()?;
        let Routes { experts, weights, plan, .. } = args.routes;
        let (factors, plan) = (read::<f32>(CHOICES, args.factors)?, read::<u32>(CHOICES, plan)?);
        let ids = &plan[..weights.len()];
        let beyond = ids.iter().find(|id| **id as usize >= experts);
        ensure(CHOICES, beyond.is_none(), || format!("expert {beyond:?} of {experts}"))?;
        write(CHOICES, weights, |weights: &mut [f32]| {
            for (weight, id) in weights.iter_mut().zip(ids) {
                *weight *= factors[*id as usize];
            }
        })
    }
}
