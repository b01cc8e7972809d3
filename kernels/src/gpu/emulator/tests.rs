//! The emulator keeps the order of commands, defers them, replays graphs, and reports faults.

use super::*;
use crate::args;
use crate::gpu::Buffer;

fn check_fault(work: impl FnOnce(&Arc<dyn Gpu>) -> Result<()>, expect: &str) {
    let gpu = Emulator::new();
    let error = work(&gpu).and_then(|()| gpu.synchronise()).unwrap_err().to_string();
    assert!(error.contains(expect), "{error}");
}

#[test]
fn a_staging_buffer_changed_too_early_shows() {
    let gpu = Emulator::new();
    let buffer = Buffer::new(&gpu, Kind::U8, 1).unwrap();
    let mut staging = gpu.staging(1).unwrap();
    staging.bytes_mut()[0] = 1;
    gpu.upload(&staging, 0, buffer.view()).unwrap();
    staging.bytes_mut()[0] = 2;
    assert_eq!(buffer.to_vec::<u8>().unwrap(), [2]);
}

#[test]
fn a_graph_runs_each_time_it_is_replayed() {
    let gpu = Emulator::new();
    let (from, to) =
        (Buffer::from_slice(&gpu, &[7u32]).unwrap(), Buffer::zeros(&gpu, Kind::U32, 1).unwrap());
    let graph = gpu.capture(&mut || gpu.copy(from.view(), to.view())).unwrap();
    assert_eq!(to.to_vec::<u32>().unwrap(), [0]);
    gpu.replay(&graph).unwrap();
    assert_eq!(to.to_vec::<u32>().unwrap(), [7]);
    gpu.fill(to.view(), 0).unwrap();
    gpu.replay(&graph).unwrap();
    assert_eq!(to.to_vec::<u32>().unwrap(), [7]);
    let error = gpu.capture(&mut || gpu.synchronise()).err().unwrap().to_string();
    assert!(error.contains("recorded"), "{error}");
    gpu.synchronise().unwrap();
}

#[test]
fn an_event_waits_for_what_came_before_it() {
    let gpu = Emulator::new();
    let buffer = Buffer::zeros(&gpu, Kind::U8, 1).unwrap();
    let staging = gpu.staging(2).unwrap();
    gpu.fill(buffer.view(), 5).unwrap();
    gpu.download(buffer.view(), &staging, 1).unwrap();
    let event = gpu.record().unwrap();
    gpu.fill(buffer.view(), 6).unwrap();
    gpu.download(buffer.view(), &staging, 1).unwrap();
    gpu.wait(&event).unwrap();
    assert_eq!(staging.bytes(), [0, 5]);
    gpu.synchronise().unwrap();
    assert_eq!(staging.bytes(), [0, 6]);
}

#[test]
fn faults_are_seen() {
    let launch = Launch { kernel: "norm_f32", blocks: [1, 1, 1], threads: 256, shared_bytes: 0 };
    check_fault(
        |gpu| gpu.launch(&Launch { kernel: "none", ..launch }, &[]),
        "no kernel of this name",
    );
    check_fault(|gpu| gpu.launch(&launch, &args![1usize]), "do not take");
    let all = |view: View| args![view, view, view, view, view.len(), 1e-5f32];
    let view = |address| View::new(address, 4, Kind::F32);
    check_fault(
        |gpu| gpu.launch(&Launch { threads: 100, ..launch }, &all(view(0))),
        "cannot be launched",
    );
    check_fault(|gpu| gpu.launch(&launch, &all(view(4096))), "outside every allocation");
    check_fault(
        |gpu| {
            let buffer = Buffer::new(gpu, Kind::F32, 5)?;
            gpu.launch(&launch, &all(buffer.view().slice(1..5)))?;
            gpu.synchronise()
        },
        "not aligned",
    );
    check_fault(
        |gpu| {
            let buffer = Buffer::new(gpu, Kind::F32, 4)?;
            let beyond = View::new(buffer.view().address(), 4, Kind::F32);
            let mut args = all(beyond);
            args[4] = 8u32.into();
            gpu.launch(&launch, &args)
        },
        "behind an allocation",
    );
    check_fault(
        |gpu| {
            let [gate_up, out] = [4, 4096].map(|len| Buffer::new(gpu, Kind::F32, len));
            let (gate_up, out) = (gate_up?, out?);
            let launch =
                Launch { kernel: "silu_f32", blocks: [1, 8, 1], threads: 128, shared_bytes: 0 };
            gpu.launch(
                &launch,
                &args![gate_up.view(), gate_up.view(), out.view(), 4usize, 4usize, 4096usize, 0u32],
            )?;
            gpu.synchronise()
        },
        "memory outside every allocation",
    );
    check_fault(|gpu| gpu.allocate(1 << 40).map(drop), "out of memory");
}

#[test]
fn a_lost_device_and_too_little_memory_are_told_apart() {
    let gpu = Emulator::new();
    assert!(matches!(gpu.allocate(1 << 40), Err(Error::OutOfMemory { op: "allocate", .. })));
    gpu.synchronise().unwrap();
    let missing = View::new(8, 1, Kind::F32);
    gpu.fill(missing, 0).unwrap();
    for _ in 0..2 {
        assert!(matches!(gpu.synchronise(), Err(Error::DeviceLost { .. })));
    }
    assert!(matches!(gpu.allocate(1), Err(Error::DeviceLost { .. })));
}

#[test]
#[should_panic(expected = "behind an allocation")]
fn a_write_behind_an_allocation_is_seen_without_waiting_again() {
    let gpu = Emulator::new();
    let buffer = Buffer::zeros(&gpu, Kind::F32, 4).unwrap();
    let beyond = View::new(buffer.view().address(), 4, Kind::F32);
    let launch = Launch { kernel: "silu_f32", blocks: [1, 2, 1], threads: 128, shared_bytes: 0 };
    gpu.launch(&launch, &args![beyond, beyond, beyond, 8usize, 8usize, 8usize, 0u32]).unwrap();
    gpu.synchronise().unwrap();
}
