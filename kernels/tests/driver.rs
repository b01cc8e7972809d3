//! Tests the whole CUDA device over a fake driver (`driver/fake.c`, compiled here), which computes
//! products for real, writes down each call, and fails where a test tells it to. It cannot show
//! that NVIDIA's driver agrees with its own headers.

#![allow(
    clippy::disallowed_methods,
    unreachable_pub,
    reason = "tests measure time, start threads and share helpers"
)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(unsafe_code, reason = "the fake driver is a C library")]

use cresset_kernels::gpu::{
    self, Arg, Buffer, DeviceOptions, Emulator, Gemm, GemmScales, Gpu, Launch, ProductChoices,
};
use cresset_kernels::{Error, args};
use half::bf16;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char, c_int};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// The fake driver, which one test uses at a time. The loader resolves the names of NVIDIA's
/// libraries to it.
struct Fake(Library);

impl Fake {
    fn start() -> MutexGuard<'static, Self> {
        static FAKE: OnceLock<Mutex<Fake>> = OnceLock::new();
        let fake = FAKE
            .get_or_init(|| Mutex::new(Self(compile())))
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        fake.forget();
        fake
    }

    fn forget(&self) {
        // SAFETY: declared as `fake.c` defines it.
        unsafe { self.0.get::<extern "C" fn()>(b"fake_forget").unwrap()() }
    }

    /// Lets the next call of this function fail with this code.
    fn fail(&self, name: &str, code: c_int) {
        let name = CString::new(name).unwrap();
        // SAFETY: declared as `fake.c` defines it.
        unsafe {
            self.0.get::<extern "C" fn(*const c_char, c_int)>(b"fake_fail").unwrap()(
                name.as_ptr(),
                code,
            );
        }
    }

    /// Sets the major compute capability from now on.
    fn capability(&self, major: c_int) {
        // SAFETY: declared as `fake.c` defines it.
        unsafe { self.0.get::<extern "C" fn(c_int)>(b"fake_capability").unwrap()(major) }
    }

    /// The calls since the last time.
    fn calls(&self) -> Vec<String> {
        // SAFETY: declared as `fake.c` defines it; the string is never freed.
        let text = unsafe {
            CStr::from_ptr(self.0.get::<extern "C" fn() -> *const c_char>(b"fake_calls").unwrap()())
        };
        let lines = text.to_str().unwrap().lines().map(str::to_owned).collect();
        self.forget();
        lines
    }
}

fn compile() -> Library {
    let folder = tempfile();
    let cc = |arguments: &[&str]| {
        let mut command = Command::new("cc");
        command
            .args(["-shared", "-fPIC", "-O2", "-Wall", "-Werror"])
            .args(arguments)
            .current_dir(&folder);
        assert!(command.status().unwrap().success(), "cc {arguments:?}");
    };
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/driver/fake.c");
    cc(&[source.to_str().unwrap(), "-o", "libcuda.so.1", "-Wl,-soname,libcuda.so.1"]);
    let open = |name: &str| {
        // SAFETY: the library has no initialisers.
        unsafe { Library::open(Some(folder.join(name)), RTLD_NOW | RTLD_GLOBAL) }.unwrap()
    };
    let fake = open("libcuda.so.1");
    let others = [
        "libcublas.so.13",
        "libcublasLt.so.13",
        "libcurand.so.10",
        "libnccl.so.2",
        "libnvidia-ml.so.1",
    ];
    for name in others {
        cc(&["-o", name, &format!("-Wl,-soname,{name}"), "-Wl,--no-as-needed", "libcuda.so.1"]);
        std::mem::forget(open(name));
    }
    fake
}

fn tempfile() -> std::path::PathBuf {
    let folder =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("driver-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

const NORM: Launch =
    Launch { kernel: "norm_f32", blocks: [3, 2, 1], threads: 256, shared_bytes: 40 };

fn said<T>(result: cresset_kernels::Result<T>) -> String {
    result.err().expect("refused").to_string()
}

#[test]
fn opening_loads_every_kernel_and_closing_gives_all_back() {
    let fake = Fake::start();
    let gpu = gpu::open(0).unwrap();
    let calls = fake.calls();
    let place = |line: &str| {
        calls.iter().position(|call| call == line).unwrap_or_else(|| panic!("{line} in {calls:#?}"))
    };
    assert!(place("stream flags 1") < place("load module"), "a stream that waits for no other");
    assert!(
        place("norm_f32 attribute 8 = 231424") < place("load norm_f32"),
        "all shared memory but its own"
    );
    assert!(
        place("norm_f32 attribute 9 = 100") < place("load norm_f32"),
        "and as much of it as can be"
    );
    let found = gpu.properties();
    assert_eq!(
        (found.name.as_str(), found.capability, found.multiprocessors),
        ("Fake 70", (9, 0), 132)
    );
    assert_eq!((found.shared_bytes, found.memory_bytes), (232_448, 70 << 30));
    assert!(found.versions.ends_with("CUDA 13.0 cuBLASLt 130002"), "{}", found.versions);
    assert_eq!(gpu.memory().unwrap(), (5 << 30, 70 << 30));
    drop(gpu);
    let calls = fake.calls();
    assert_eq!(calls.last().map(String::as_str), Some("release context 70"), "{calls:#?}");
    assert!(
        calls.contains(&"unload module".into()) && calls.contains(&"destroy handle".into()),
        "{calls:#?}"
    );
}

#[test]
fn obstacles_to_opening_are_named() {
    let fake = Fake::start();
    let check = |function: &str, code: c_int, parts: &[&str]| {
        fake.fail(function, code);
        let said = said(gpu::open(0));
        assert!(parts.iter().all(|part| said.contains(part)), "{function}: {said}");
    };
    check("cuInit", 100, &["no GPU can be used", "NO_DEVICE", "nvidia-smi"]);
    check("cuModuleLoadData", 209, &["load kernels", "NO_BINARY_FOR_GPU"]);
    check("cublasLtCreate", 1, &["gemm", "NOT_INITIALIZED"]);
    assert!(said(gpu::open(1)).contains("cuda:1 is not among the 1 GPUs"));
    gpu::open(0).unwrap();
}

#[test]
fn values_go_there_and_back_through_pinned_memory() {
    let fake = Fake::start();
    let gpu = gpu::open(0).unwrap();
    fake.calls();
    let values = [1.5f32, -2.0, 3.25];
    let buffer = Buffer::from_slice(&gpu, &values).unwrap();
    assert_eq!(
        fake.calls(),
        [
            "allocate 12",
            "event flags 1",
            "pin 12 flags 0",
            "upload 12",
            "synchronise",
            "synchronise",
            "unpin"
        ]
    );
    let other = Buffer::zeros(&gpu, buffer.view().kind(), 3).unwrap();
    gpu.copy(buffer.view().slice(1..3), other.view().slice(0..2)).unwrap();
    assert_eq!(fake.calls(), ["allocate 12", "fill 12 with 0", "copy 8"]);
    assert_eq!(other.to_vec::<f32>().unwrap(), [-2.0, 3.25, 0.0]);
    assert!(said(gpu.copy(buffer.view(), other.view().slice(0..1))).contains("copy"));
    fake.calls();
    // The fake refuses copies of no bytes.
    let (staging, none) = (gpu.staging(0).unwrap(), other.view().slice(3..3));
    gpu.upload(&staging, 0, none).and_then(|()| gpu.download(none, &staging, 0)).unwrap();
    gpu.copy(none, none).and_then(|()| gpu.fill(none, 0)).unwrap();
    drop(staging);
    fake.calls();
    drop(other);
    assert_eq!(fake.calls(), ["synchronise", "free"], "what was launched may still use it");
    let short = gpu.staging(8).unwrap();
    assert!(
        said(gpu.upload(&short, 0, buffer.view()))
            .contains("12 bytes at 0 of a staging buffer of 8")
    );
    fake.fail("cuMemAlloc_v2", 2);
    assert!(said(gpu.allocate(7 << 30)).contains("7168 MiB do not fit in 5120 free MiB"));
    let event = gpu.record().unwrap();
    fake.fail("cuEventSynchronize", 700);
    assert!(said(gpu.wait(&event)).contains("ILLEGAL_ADDRESS: an illegal memory access"));
    gpu.wait(&event).unwrap();
}

#[test]
fn the_kernel_with_the_most_parameters_can_be_launched() {
    let fake = Fake::start();
    let gpu = gpu::open(0).unwrap();
    let x = Buffer::from_slice(&gpu, &[0f32; 8]).unwrap();
    fake.calls();
    let (pointer, number) = (Arg::View(x.view()), Arg::U32(7));
    let mut arguments = vec![pointer; 7];
    let (sizes, factors) = ([number; 8], [Arg::F32(1.0); 2]);
    let (plan, its_sizes) = ([pointer; 3], [number; 4]);
    arguments.extend([&sizes[..], &factors, &plan, &its_sizes].concat());
    gpu.launch(&Launch { kernel: "attention_decode_f32", ..NORM }, &arguments).unwrap();
    let calls = fake.calls();
    let passed = calls[0].split(": ").nth(1).unwrap();
    assert_eq!(passed.split(' ').count(), 24, "{calls:?}");
    let address = x.view().address();
    let end = format!("3f800000 3f800000 {address:x} {address:x} {address:x} 7 7 7 7");
    assert!(passed.ends_with(&end), "{passed}");
}

#[test]
fn a_launch_passes_what_the_kernel_takes() {
    let fake = Fake::start();
    let gpu = gpu::open(0).unwrap();
    let x = Buffer::from_slice(&gpu, &[0f32; 8]).unwrap().view();
    fake.calls();
    let arguments = args![x, None, x.slice(2..4), x.slice(4..8), 8usize, 1.0f32];
    gpu.launch(&NORM, &arguments).unwrap();
    let at = x.address();
    let passed = format!("{at:x} 0 {:x} {:x} 8 3f800000", at + 8, at + 16);
    let shape = "blocks 3 2 1 threads 256 1 1 shared 40 stream 51 extra 0";
    assert_eq!(fake.calls(), [format!("overlapped launch norm_f32 {shape}: {passed}")]);
    let refused: [(&[Arg], &str); 2] =
        [(&arguments[..5], "parameters take"), (&args![x, x, x, x, x, 1.0f32], "parameters take")];
    for (arguments, part) in refused {
        assert!(said(gpu.launch(&NORM, arguments)).contains(part));
    }
    assert!(
        said(gpu.launch(&Launch { kernel: "norm_f64", ..NORM }, &[]))
            .contains("norm_f64: unsupported kernel")
    );
    assert_eq!(fake.calls(), [""; 0], "nothing refused is launched");
    // A refused call leaves the device usable; a kernel that failed on it does not.
    fake.fail("cuLaunchKernelEx", 1);
    assert!(matches!(gpu.launch(&NORM, &arguments), Err(Error::Device { op: "norm_f32", .. })));
    fake.fail("cuLaunchKernelEx", 719);
    assert!(matches!(gpu.launch(&NORM, &arguments), Err(Error::DeviceLost { op: "norm_f32", .. })));
}

/// By their numbers: after the first ones no call of the process works any more.
#[test]
fn an_error_tells_whether_the_process_can_go_on() {
    let fake = Fake::start();
    let gpu = gpu::open(0).unwrap();
    let kind = |code: c_int| {
        fake.fail("cuStreamSynchronize", code);
        match gpu.synchronise().unwrap_err() {
            Error::DeviceLost { .. } => "lost",
            Error::OutOfMemory { .. } => "out of memory",
            _ => "other",
        }
    };
    let lost =
        [214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999];
    for (codes, expect) in [(&lost[..], "lost"), (&[2], "out of memory"), (&[1, 801], "other")] {
        for code in codes {
            assert_eq!(kind(*code), expect, "{code}");
        }
    }
    fake.fail("cuMemHostAlloc", 2);
    assert!(matches!(gpu.staging(64), Err(Error::OutOfMemory { op: "staging", .. })));
}

#[test]
fn a_gpus_condition_is_asked_of_its_place_on_the_bus() {
    let fake = Fake::start();
    let sensor = gpu::sensor(0).unwrap();
    let found = || sensor.read().celsius;
    assert_eq!(found(), Some(41));
    fake.fail("nvmlDeviceGetTemperature", 15);
    assert_eq!((found(), found()), (None, Some(41)), "a refusal is no error");
    let known = sensor.read();
    assert_eq!(known, gpu::GpuHealth { celsius: Some(41), ..gpu::GpuHealth::default() });
    fake.fail("nvmlInit_v2", 9);
    assert_eq!(gpu::sensor(0).unwrap_err(), "NVML cannot be used (status 9)");
    assert!(gpu::sensor(1).unwrap_err().contains("cuda:1 is not among the 1 GPUs"));
}

#[test]
fn launches_overlap_where_that_was_found_to_work() {
    let fake = Fake::start();
    let check = |what: &str, options: &DeviceOptions, overlapped: bool| {
        let gpu = gpu::open_with(0, options).unwrap();
        let x = Buffer::from_slice(&gpu, &[0f32; 8]).unwrap().view();
        fake.calls();
        gpu.launch(&NORM, &args![x, None, x, x, 8usize, 1.0f32]).unwrap();
        assert_eq!(fake.calls()[0].starts_with("overlapped"), overlapped, "{what}");
    };
    let options = DeviceOptions::default();
    check("capability 9.0", &options, true);
    check("not wanted", &DeviceOptions { plain_launches: true, ..options.clone() }, false);
    for (function, code) in [
        ("overlapped launch", 801),
        ("waiting", 1),
        ("cuStreamEndCapture", 906),
        ("cuGraphInstantiateWithFlags", 1),
        ("cuGraphLaunch", 719),
    ] {
        fake.fail(function, code);
        check(function, &options, false);
    }
    fake.capability(8);
    check("capability 8.0", &options, false);
    fake.capability(12);
    check("capability 12.0, from PTX", &options, true);
    fake.capability(7);
    assert!(said(gpu::probe(0)).contains("too old: it is sm_70"));
    assert!(said(gpu::open(0)).contains("too old: it is sm_70"));
    fake.capability(9);
}

#[test]
fn the_free_memory_of_a_device_is_told_without_keeping_any() {
    let fake = Fake::start();
    assert_eq!(gpu::free_memory(0).unwrap(), 5 << 30);
    assert_eq!(fake.calls().last().map(String::as_str), Some("release context 70"));
}

#[test]
fn a_graph_is_recorded_once_and_replayed() {
    let fake = Fake::start();
    let gpu = gpu::open(0).unwrap();
    let x = Buffer::from_slice(&gpu, &[1f32; 8]).unwrap();
    let y = Buffer::zeros(&gpu, x.view().kind(), 8).unwrap();
    let (a, b) = (x.view(), y.view());
    let step = || {
        gpu.copy(a, b)?;
        gpu.launch(&NORM, &args![a, None, a, b, 8usize, 1.0f32])?;
        gpu.gemm(&Gemm::contiguous(a, a, b, [2, 2, 4]))
    };
    fake.calls();
    let graph = gpu.capture(&mut || step()).unwrap();
    let calls = fake.calls();
    let first_words =
        |call: &String| call.split(',').next().unwrap().split(" blocks").next().unwrap().to_owned();
    let words: Vec<String> = calls.iter().map(first_words).collect();
    let expected = [
        "begin capture",
        "recorded copy 32",
        "recorded overlapped launch norm_f32",
        "describe",
        "candidates",
        "recorded product by 1",
        "end capture",
        "instantiate",
        "upload graph",
    ];
    assert_eq!(words, expected, "no measuring inside");
    assert!(
        calls[0].ends_with("mode 1") && calls[7].ends_with("flags 0"),
        "thread-local, plain: {calls:#?}"
    );
    assert_eq!(y.to_vec::<f32>().unwrap(), [0.0; 8], "recording runs nothing");
    fake.calls();
    gpu.replay(&graph).unwrap();
    gpu.replay(&graph).unwrap();
    assert_eq!(fake.calls(), ["launch graph", "launch graph"]);
    let broken = gpu.capture(&mut || gpu.launch(&NORM, &[]));
    assert!(matches!(broken, Err(Error::Shape { .. })), "the reason, not what became of the graph");
    assert_eq!(
        fake.calls(),
        [
            "begin capture, mode 1",
            "end capture",
            "instantiate, flags 0",
            "destroy exec",
            "destroy graph"
        ]
    );
    step().unwrap();
    assert!(!fake.calls().iter().any(|call| call.starts_with("recorded")), "the stream runs again");
    fake.fail("cuStreamEndCapture", 901);
    assert!(said(gpu.capture(&mut || step())).contains("CAPTURE_INVALIDATED"));
    let foreign = Emulator::new().capture(&mut || Ok(())).unwrap();
    assert!(said(gpu.replay(&foreign)).contains("another device"));
    drop(graph);
    assert!(fake.calls().contains(&"destroy exec".into()));
}

#[test]
fn no_device_is_opened_while_a_graph_is_recorded() {
    let fake = Fake::start();
    let gpu = gpu::open(0).unwrap();
    fake.calls();
    let mut other = None;
    gpu.capture(&mut || {
        other = Some(std::thread::spawn(|| gpu::open(0).map(drop)));
        std::thread::sleep(Duration::from_millis(50));
        Ok(())
    })
    .unwrap();
    other.unwrap().join().unwrap().unwrap();
    let calls = fake.calls();
    let place = |what: &str| calls.iter().position(|call| call == what).unwrap();
    for what in ["synchronise context", "load module"] {
        assert!(place("end capture") < place(what), "{what} in {calls:#?}");
    }
}

/// A product with padded rows, on some device.
fn product(gpu: &Arc<dyn Gpu>, seed: usize, n: usize, wide: bool, bias: bool) -> Vec<f32> {
    let (rows, cols, x_stride, out_stride) = (5, 12, 16, 7);
    let numbers = |count: usize, part: usize| -> Vec<bf16> {
        (0..count)
            .map(|i| bf16::from_f32(((i * 37 + seed * 5 + part) % 17) as f32 / 4.0 - 2.0))
            .collect()
    };
    let narrow = |values: &[bf16]| Buffer::from_slice(gpu, values).unwrap();
    let full = |values: &[bf16]| {
        Buffer::from_slice(gpu, &values.iter().map(|v| v.to_f32()).collect::<Vec<_>>()).unwrap()
    };
    let upload = |values: &[bf16]| if wide { full(values) } else { narrow(values) };
    let (x, w, b) = (
        upload(&numbers(n * x_stride, 1)),
        upload(&numbers(rows * cols, 2)),
        upload(&numbers(rows, 3)),
    );
    let out = upload(&numbers(n * out_stride, 4));
    let bias = bias.then(|| b.view());
    let (x, w, view) = (x.view(), w.view(), out.view());
    let gemm = Gemm { x, x_stride, w, bias, out: view, out_stride, n, rows, cols, scales: None };
    gpu.gemm(&gemm).unwrap();
    if wide {
        out.to_vec().unwrap()
    } else {
        out.to_vec::<bf16>().unwrap().iter().map(|v| v.to_f32()).collect()
    }
}

#[test]
fn products_equal_the_emulators() {
    let _fake = Fake::start();
    let (gpu, emulator) = (gpu::open(0).unwrap(), Emulator::new());
    for (n, wide, bias) in
        [(1, false, false), (3, false, true), (3, true, true), (8, true, false), (0, true, false)]
    {
        // The second time the plan is ready, except for the addresses.
        for seed in 0..2 {
            let [got, want] = [&gpu, &emulator].map(|gpu| product(gpu, seed, n, wide, bias));
            assert_eq!(got, want, "n {n}, f32 {wide}, bias {bias}, seed {seed}");
        }
    }
}

/// A product of codes of E4M3 with a scale for each row, or for each 128 columns of it, or none.
fn product_of_codes(gpu: &Arc<dyn Gpu>, groups: usize, bias: bool) -> Vec<bf16> {
    const CODES: [u8; 5] = [0x00, 0x30, 0x38, 0x40, 0xb8];
    let (n, rows, cols) = (4, 16, 256);
    let codes = |count: usize| -> Vec<u8> { (0..count).map(|i| CODES[i * 37 % 11 % 5]).collect() };
    let scales = |count: usize| -> Vec<f32> {
        (0..groups.max(1) * count).map(|i| 2f32.powi((i * 7 % 5) as i32 - 2)).collect()
    };
    let [x, w] = [n, rows].map(|count| Buffer::from_slice(gpu, &codes(count * cols)).unwrap());
    let [of_x, of_w] = [n, rows].map(|count| Buffer::from_slice(gpu, &scales(count)).unwrap());
    let b = Buffer::from_slice(gpu, &[bf16::from_f32(0.5); 16]).unwrap();
    let out = Buffer::from_slice(gpu, &vec![bf16::NAN; n * rows]).unwrap();
    let gemm = Gemm {
        x: x.view(),
        x_stride: cols,
        w: w.view(),
        bias: bias.then(|| b.view()),
        out: out.view(),
        out_stride: rows,
        n,
        rows,
        cols,
        scales: (groups > 0).then(|| GemmScales { x: of_x.view(), w: of_w.view() }),
    };
    gpu.gemm(&gemm).unwrap();
    out.to_vec().unwrap()
}

#[test]
fn products_of_codes_equal_the_emulators() {
    let _fake = Fake::start();
    let (gpu, emulator) = (gpu::open(0).unwrap(), Emulator::new());
    for (groups, bias) in [(0, false), (1, false), (2, true), (2, false)] {
        let [got, want] = [&gpu, &emulator].map(|gpu| product_of_codes(gpu, groups, bias));
        assert_eq!(got, want, "{groups} groups, bias {bias}");
    }
}

#[test]
fn the_fastest_algorithm_is_measured_once_and_kept() {
    let fake = Fake::start();
    let kept = RefCell::new(BTreeSet::new());
    let run_failing = |n: usize, failing: &str| {
        // What a record has of the device before.
        let products = ProductChoices::of(kept.borrow().iter().map(String::as_str));
        let options = DeviceOptions { products, ..DeviceOptions::default() };
        let gpu = gpu::open_with(0, &options).unwrap();
        fake.calls();
        fake.fail(failing, 15);
        product(&gpu, 0, n, true, true);
        product(&gpu, 0, n, true, true);
        let calls = fake.calls();
        assert_eq!(
            calls.iter().filter(|call| *call == "describe").count(),
            1,
            "descriptors are kept"
        );
        let asked = calls.iter().filter(|call| call.starts_with("candidates")).count();
        let products: Vec<String> =
            calls.into_iter().filter(|call| call.starts_with("product")).collect();
        kept.replace(options.products.lines());
        (asked, products)
    };
    let run = |n: usize| run_failing(n, "nothing");
    let once = "product by 2, workspace 33554432".to_owned();
    let (asked, products) = run(5);
    assert_eq!(
        (asked, products.len()),
        (1, 3 * 6 + 2),
        "three candidates in six rounds, then the best"
    );
    assert_eq!(products[18..], [once.clone(), once.clone()]);
    assert_eq!(run(5), (0, vec![once.clone(); 2]), "kept over a restart");
    assert_eq!(run(7).0, 0, "rows of one power of two share a choice");
    assert_eq!(run(9).0, 1, "others do not");
    let guess = "product by 1, workspace 33554432".to_owned();
    let refused = run_failing(6, "cublasLtMatmulAlgoCheck");
    assert_eq!(
        refused,
        (1, vec![guess; 2]),
        "where the choice does not do, the first guess does, unmeasured"
    );
    // Another choice of the record is applied, not measured.
    let slow = |line: &String| line.replace(" 0000000000000002 ", " 0000000000000003 ");
    let other = kept.borrow().iter().map(slow).collect();
    kept.replace(other);
    assert_eq!(run(5), (0, vec!["product by 3, workspace 33554432".to_owned(); 2]));
    kept.replace(BTreeSet::new());
    assert_eq!(run(5).0, 1, "measured anew");
}

#[test]
fn products_that_the_library_cannot_compute_are_refused() {
    let fake = Fake::start();
    let gpu = gpu::open(0).unwrap();
    let x = Buffer::from_slice(&gpu, &[bf16::ONE; 16]).unwrap();
    let out = Buffer::from_slice(&gpu, &[0f32; 16]).unwrap();
    let (x, out) = (x.view(), out.view());
    let gemm = Gemm::contiguous(x, x, out, [4, 4, 4]);
    gpu.gemm(&gemm).unwrap();
    let bias = Gemm { bias: Some(x.slice(0..4)), ..gemm };
    assert!(matches!(gpu.gemm(&bias), Err(Error::Unsupported { .. })));
    assert!(matches!(gpu.gemm(&Gemm { rows: 5, ..gemm }), Err(Error::Shape { .. })));
    fake.fail("cublasLtMatmul", 13);
    assert!(said(gpu.gemm(&gemm)).contains("EXECUTION_FAILED"));
    let tight = Gemm { x: x.slice(1..16), n: 3, out: out.slice(0..12), ..gemm };
    gpu.gemm(&tight).unwrap();
    assert!(
        fake.calls().iter().any(|call| call.contains("alignment 2 2 2 2")),
        "the least aligned operand counts"
    );
}

/// The fake has one GPU, so the group has one rank.
#[test]
fn ranks_exchange_over_nccl() {
    let fake = Fake::start();
    let open = || gpu::open_group(&[0], &DeviceOptions::default()).map(|mut all| all.remove(0));
    let gpu = open().unwrap();
    assert_eq!((gpu.rank().number, gpu.rank().count), (0, 1));
    let from = Buffer::from_slice(&gpu, &[1.5f32, -2.0]).unwrap();
    let to = Buffer::zeros(&gpu, from.view().kind(), 2).unwrap();
    assert!(fake.calls().contains(&"open 1 ranks, the first on 0".into()));
    gpu.all_gather(from.view(), to.view()).unwrap();
    assert_eq!(fake.calls(), ["gather 8"]);
    assert_eq!(to.to_vec::<f32>().unwrap(), [1.5, -2.0]);
    assert!(said(gpu.all_gather(from.view(), to.view().slice(0..1))).contains("all_gather"));
    fake.fail("ncclAllGather", 3);
    assert!(said(gpu.all_gather(from.view(), to.view())).contains("NCCL: internal error"));
    // A failure of work that was given to the stream is told by whoever waits for it.
    fake.fail("asynchronous", 6);
    assert!(said(gpu.synchronise()).contains("NCCL: remote process exited"));
    fake.calls();
    gpu.abandon("no memory");
    gpu.abandon("another reason");
    assert_eq!(fake.calls(), ["abort rank 0"]);
    let error = gpu.all_gather(from.view(), to.view()).unwrap_err();
    assert!(matches!(error, Error::GroupLost { detail, .. } if detail == "no memory"));
    drop((from, to, gpu));
    assert!(!fake.calls().contains(&"close rank 0".into()), "it was aborted");
    drop(open().unwrap());
    assert!(fake.calls().contains(&"close rank 0".into()));
    fake.fail("ncclCommInitAll", 2);
    assert!(said(open()).contains("open ranks"));
    // A GPU by itself asks no library.
    let alone = gpu::open(0).unwrap();
    let from = Buffer::from_slice(&alone, &[3.0f32]).unwrap();
    let to = Buffer::zeros(&alone, from.view().kind(), 1).unwrap();
    fake.calls();
    alone.all_gather(from.view(), to.view()).unwrap();
    assert_eq!(fake.calls(), ["copy 4"]);
}
