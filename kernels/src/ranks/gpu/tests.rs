//! Several emulated devices, each with a thread of its own, against the reference. A machine's GPUs
//! are not asked for: most machines have one.

use super::super::reference;
use super::*;
use crate::Error;
use crate::gpu::{Emulator, Kind};
use crate::testing::{KINDS, downloaded, poisoned_buffer, random, rounded, upload, values};
use std::thread;

fn group(count: usize) -> Vec<DeviceOps> {
    Emulator::group(&vec![Emulator::card("rtx-3060", 64 << 20).unwrap(); count])
}

/// Runs `work` for every rank on a thread of its own, and returns the results in their order.
fn on_each<T: Send>(gpus: &[DeviceOps], work: impl Fn(&DeviceOps) -> T + Sync) -> Vec<T> {
    let work = &work;
    thread::scope(|scope| {
        let ranks: Vec<_> = gpus.iter().map(|gpu| scope.spawn(move || work(gpu))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Other values for every rank.
fn values_of(gpu: &DeviceOps, kind: Kind, len: usize) -> Vec<f32> {
    let seed = Ranks::rank(gpu).number as u64 + 1;
    rounded(kind, &values(&random(&[len], seed)))
}

#[test]
fn all_ranks_get_the_sum_with_the_same_bits() {
    for count in 1..4 {
        let gpus = group(count);
        for (len, (kind, _)) in [0, 1, 8, 37, 1024, 1100].into_iter().zip(KINDS.iter().cycle()) {
            let all: Vec<_> = gpus.iter().map(|gpu| values_of(gpu, *kind, len)).collect();
            let want = rounded(*kind, &reference::all_reduce(&all));
            let found = on_each(&gpus, |gpu| {
                let x = upload(gpu, *kind, &values_of(gpu, *kind, len));
                let parts = poisoned_buffer(gpu, *kind, count * len);
                gpu.all_reduce(&AllReduceArgs { x: x.view(), parts: parts.view() }).unwrap();
                downloaded(&x)
            });
            for sums in found {
                assert_eq!(sums, want, "{len} values of {kind:?} on {count} ranks");
            }
        }
    }
}

#[test]
fn all_ranks_get_the_columns_of_all() {
    for (count, rows, columns, at_once) in
        [(1, 2, 9, 1), (2, 3, 10, 3), (2, 5, 9, 2), (3, 4, 10, 1), (3, 0, 7, 1), (2, 2, 301, 5)]
    {
        let gpus = group(count);
        let part = |gpu: &DeviceOps| {
            let own = Ranks::rank(gpu).share(columns).len();
            values_of(gpu, Kind::F32, rows * own)
        };
        let all: Vec<_> = gpus.iter().map(part).collect();
        let want = reference::gather_columns(&all, rows, columns);
        let found = on_each(&gpus, |gpu| {
            let most = Ranks::rank(gpu).largest_share(columns);
            let mut padded = part(gpu);
            padded.resize(rows * most, f32::NAN);
            let part = upload(gpu, Kind::F32, &padded);
            let parts = poisoned_buffer(gpu, Kind::F32, at_once * count * most);
            let out = poisoned_buffer(gpu, Kind::F32, rows * columns);
            let (part, parts) = (part.view(), parts.view());
            let args = GatherColumnsArgs { part, columns, parts, out: out.view() };
            gpu.gather_columns(&args).unwrap();
            downloaded(&out)
        });
        for out in found {
            assert_eq!(out, want, "{rows} by {columns} on {count} ranks, {at_once} at once");
        }
    }
}

/// A recorded exchange takes what the buffer holds when it is replayed.
#[test]
fn exchanges_are_recorded() {
    let gpus = group(2);
    let found = on_each(&gpus, |gpu| {
        let x = upload(gpu, Kind::F32, &values_of(gpu, Kind::F32, 8));
        let parts = poisoned_buffer(gpu, Kind::F32, 16);
        let args = AllReduceArgs { x: x.view(), parts: parts.view() };
        let graph = gpu.capture(&mut || gpu.all_reduce(&args)).unwrap();
        (0..3).for_each(|_| gpu.replay(&graph).unwrap());
        downloaded(&x)
    });
    let once = reference::all_reduce(&[1, 2].map(|seed| values(&random(&[8], seed))));
    let four_times: Vec<f32> = once.iter().map(|x| 4.0 * x).collect();
    assert_eq!(found, vec![four_times; 2]);
}

/// A rank that waits for one that failed gets an error that says so, as does every later call.
#[test]
fn a_rank_that_fails_ends_the_others() {
    let gpus = group(3);
    let exchange = |gpu: &DeviceOps| {
        let x = poisoned_buffer(gpu, Kind::F32, 4);
        let parts = poisoned_buffer(gpu, Kind::F32, 12);
        gpu.all_reduce(&AllReduceArgs { x: x.view(), parts: parts.view() })?;
        gpu.synchronise()
    };
    let found = on_each(&gpus, |gpu| {
        if Ranks::rank(gpu).number == 1 {
            gpu.abandon("GPU 1 of 3 failed: no memory");
            gpu.abandon("a later reason");
            return None;
        }
        Some([exchange(gpu).unwrap_err(), gpu.synchronise().unwrap_err()])
    });
    for error in found.into_iter().flatten().flatten() {
        let told = matches!(&error, Error::GroupLost { detail, .. } if detail.ends_with("memory"));
        assert!(told, "{error}");
    }
}

/// The same for a rank whose device is closed, as when its thread has panicked.
#[test]
fn a_rank_that_goes_away_ends_the_others() {
    let mut gpus = group(2);
    let (last, first) = (gpus.pop().unwrap(), gpus.pop().unwrap());
    let x = poisoned_buffer(&first, Kind::F32, 4);
    let parts = poisoned_buffer(&first, Kind::F32, 8);
    first.all_reduce(&AllReduceArgs { x: x.view(), parts: parts.view() }).unwrap();
    let error = thread::scope(|scope| {
        let waiting = scope.spawn(|| first.synchronise().unwrap_err());
        drop(last);
        waiting.join().unwrap()
    });
    assert!(error.to_string().contains("rank 1 (of 0 to 1) was closed"), "{error}");
}

#[test]
fn parts_of_several_lengths_are_an_error_on_all_ranks() {
    let gpus = group(2);
    let found = on_each(&gpus, |gpu| {
        let len = 4 + Ranks::rank(gpu).number;
        let [from, to] = [len, 2 * len].map(|len| poisoned_buffer(gpu, Kind::F32, len));
        gpu.all_gather(from.view(), to.view()).unwrap();
        gpu.synchronise().unwrap_err().to_string()
    });
    assert!(found.iter().all(|error| error.contains("parts of [16, 20] bytes")), "{found:?}");
}
