//! The last minutes of a node, which the page draws as curves.

use crate::Console;
use cresset_base::{Recent, UnixMillis};
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Between two samples.
pub(super) const EVERY: Duration = Duration::from_secs(2);
/// What a node did at one time, over all its models.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct NodeSample {
    pub at: UnixMillis,
    pub tokens_per_second: f64,
    pub running: usize,
    pub waiting: usize,
    /// Share of the blocks of all KV caches in use, 0 to 1.
    pub kv_used: f64,
}

/// The samples of ten minutes.
pub(crate) type NodeHistory = Recent<NodeSample, 300>;

/// Samples the node until it stops.
pub async fn sample(live: Arc<Console>, stop: CancellationToken) {
    loop {
        live.history.note(now(&live));
        if stop.run_until_cancelled(tokio::time::sleep(EVERY)).await.is_none() {
            return;
        }
    }
}

fn now(live: &Console) -> NodeSample {
    let mut sample = NodeSample { at: live.node.clock.now(), ..NodeSample::default() };
    let (mut used, mut blocks) = (0, 0);
    for view in live.node.pool.views() {
        let stats = view.stats();
        sample.tokens_per_second += stats.tokens_per_second;
        sample.running += stats.running;
        sample.waiting += stats.waiting + view.usage.waiting;
        used += stats.blocks_used;
        blocks += stats.blocks_total;
    }
    sample.kv_used = used as f64 / blocks.max(1) as f64;
    sample
}

/// The value below which `share` of the values lie (nearest rank); `None` where there are none.
pub(super) fn quantile(values: &mut [f64], share: f64) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let rank = (share * values.len() as f64).ceil().max(1.0) as usize;
    values.get(rank - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_that_were_seen() {
        let check = |values: &[f64], share, expect| {
            assert_eq!(quantile(&mut values.to_vec(), share), expect, "{values:?} {share}");
        };
        check(&[], 0.5, None);
        check(&[3.0], 0.5, Some(3.0));
        check(&[2.0, 1.0], 0.5, Some(1.0));
        check(&[3.0, 1.0, 2.0], 0.5, Some(2.0));
        check(&[3.0, 1.0, 2.0], 0.95, Some(3.0));
        check(&[3.0, 1.0, 2.0], 0.0, Some(1.0));
    }
}
