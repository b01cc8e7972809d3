//! Whose turn it is, for designed costs.

use super::*;
use uuid::Uuid;

fn account(number: u128) -> AccountId {
    AccountId(Uuid::from_u128(number))
}

/// Every pop is charged `cost` and put back: the order in which accounts are served.
fn turns(costs: &[(u128, usize)], count: usize) -> Vec<u128> {
    let mut queue = FairQueue::new(1_000);
    for &(number, _) in costs {
        queue.push_waiting(account(number), SequenceId(number as u64));
    }
    (0..count)
        .map(|_| {
            let id = queue.pop(true).expect("the queue is never empty");
            let (number, cost) = costs[id.0 as usize - 1];
            queue.charge(account(number), cost);
            queue.push_waiting(account(number), id);
            number
        })
        .collect()
}

#[test]
fn turns_are_as_long_as_the_quantum_allows() {
    let quantum = QUANTUM as usize;
    let check = |costs: &[(u128, usize)], expect: &[u128]| {
        assert_eq!(turns(costs, expect.len()), expect, "{costs:?}");
    };
    check(&[(1, quantum), (2, quantum)], &[1, 2, 1, 2]);
    check(&[(1, quantum / 2), (2, quantum)], &[1, 1, 2, 1, 1, 2]);
    check(&[(1, 3 * quantum), (2, quantum)], &[1, 2, 2, 2, 1, 2, 2, 2]);
}

#[test]
fn running_prompts_come_before_waiting_ones_and_older_before_younger() {
    let mut queue = FairQueue::new(1_000);
    let mine = account(1);
    queue.push_waiting(mine, SequenceId(1));
    queue.push_partial(mine, SequenceId(3));
    queue.push_partial(mine, SequenceId(2));
    let mut pop = |admitting| queue.pop(admitting).map(|id| id.0);
    assert_eq!(pop(true), Some(2));
    assert_eq!(pop(false), Some(3));
    assert_eq!(pop(false), None);
    assert_eq!(pop(true), Some(1));
}

#[test]
fn an_account_that_leaves_takes_its_debt_along() {
    let mut queue = FairQueue::new(1_000);
    queue.push_waiting(account(1), SequenceId(1));
    queue.push_waiting(account(2), SequenceId(2));
    queue.charge(account(1), 900);
    queue.remove(account(1), SequenceId(1), true);
    assert!(!queue.contains(account(1), SequenceId(1)));
    queue.push_waiting(account(1), SequenceId(3));
    assert_eq!(queue.lanes[&account(1)].deficit, 0);
}
