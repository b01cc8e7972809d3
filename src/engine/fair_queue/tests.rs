//! Tests the order in which accounts are served, for chosen costs.

use super::*;
use uuid::Uuid;

fn account(number: u128) -> AccountId {
    AccountId(Uuid::from_u128(number))
}

/// The order in which accounts are served when every popped sequence is charged its account's cost
/// and put back.
fn turns(costs: &[(u128, usize)], count: usize) -> Vec<u128> {
    let mut queue = FairQueue::new(1_000);
    for &(number, _) in costs {
        queue.push_waiting(account(number), SequenceId(number as u64), 0);
    }
    (0..count)
        .map(|_| {
            let id = queue.pop(true).expect("the queue is never empty");
            let (number, cost) = costs[id.0 as usize - 1];
            queue.charge(account(number), cost);
            queue.push_waiting(account(number), id, 0);
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
    queue.push_waiting(mine, SequenceId(1), 0);
    queue.push_partial(mine, SequenceId(3));
    queue.push_partial(mine, SequenceId(2));
    let mut pop = |may_start| queue.pop(may_start).map(|id| id.0);
    assert_eq!(pop(true), Some(2));
    assert_eq!(pop(false), Some(3));
    assert_eq!(pop(false), None);
    assert_eq!(pop(true), Some(1));
}

#[test]
fn an_account_that_leaves_takes_its_debt_along() {
    let mut queue = FairQueue::new(1_000);
    queue.add(account(1), SequenceId(1), 0);
    queue.add(account(2), SequenceId(2), 0);
    queue.charge(account(1), 900);
    queue.forget(account(1), SequenceId(1));
    assert!(!queue.contains(account(1), SequenceId(1)));
    queue.add(account(1), SequenceId(3), 0);
    assert_eq!(queue.accounts[&account(1)].balance, 0);
}

#[test]
fn higher_priorities_come_first_and_waiting_raises_them() {
    // `waiting` has each account's priority and the number of steps since it was last given a
    // token; `expect` is the order of service in one step.
    let check = |waiting: &[(u8, u64)], expect: &[u64]| {
        let mut queue = FairQueue::new(1_000);
        for (&(priority, _), number) in waiting.iter().zip(1..) {
            queue.push_waiting(account(number), SequenceId(number as u64), priority);
        }
        for step in (0..=5 * STEPS_PER_RANK).rev() {
            queue.begin_step();
            let served = waiting.iter().zip(1..).filter(|((_, since), _)| *since == step);
            served.for_each(|(_, number)| queue.charge(account(number), 0));
        }
        let order: Vec<u64> = std::iter::from_fn(|| queue.pop(true)).map(|id| id.0).collect();
        assert_eq!(order, expect, "{waiting:?}");
    };
    check(&[(0, 0), (2, 0), (1, 0)], &[2, 3, 1]);
    check(&[(0, STEPS_PER_RANK - 1), (1, 0)], &[2, 1]);
    check(&[(0, 2 * STEPS_PER_RANK), (1, 0)], &[1, 2]);
    check(&[(0, 3 * STEPS_PER_RANK), (2, STEPS_PER_RANK - 1), (1, STEPS_PER_RANK)], &[1, 2, 3]);
}
