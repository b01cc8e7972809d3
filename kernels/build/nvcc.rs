//! What nvcc is asked for, and what its report tells. The build script uses it, and a test of the
//! crate, which no build script can have.

/// Names the architectures to compile for.
pub(crate) const ARCHITECTURES: &str = "CRESSET_CUDA_ARCHITECTURES";
pub(crate) const DEFAULT: &str = "80,90";
/// The first architecture whose code lets the next kernel begin early.
const OVERLAPPING: u32 = 90;

/// The arguments for these architectures: machine code of each, and PTX of the lowest for all later
/// ones. Where that would not overlap and others do, there is PTX of the first that does, too: a
/// driver takes the latest that its device can run.
pub(crate) fn arguments(architectures: &str) -> Result<Vec<String>, String> {
    let fixed = ["-fatbin", "-std=c++17", "-O3", "--compress-mode=size", "-Xptxas=-v", "-I", "src"];
    let mut arguments = fixed.map(str::to_owned).to_vec();
    let (mut lowest, mut highest) = (u32::MAX, 0);
    for name in architectures.split(',').map(str::trim) {
        let number = name.trim_end_matches(|c: char| c.is_ascii_lowercase()).parse::<u32>();
        let number =
            number.map_err(|_| format!("{ARCHITECTURES}: {name:?} is not like 80, 90 or 90a"))?;
        (lowest, highest) = (lowest.min(number), highest.max(number));
        // All devices of sm_90 have the instructions of warp groups, which no later one has.
        let name = if number == 90 { "90a" } else { name };
        arguments.push(format!("-gencode=arch=compute_{name},code=sm_{name}"));
    }
    let overlapping = (lowest < OVERLAPPING && highest >= OVERLAPPING).then_some(OVERLAPPING);
    for number in [lowest].into_iter().chain(overlapping) {
        arguments.push(format!("-gencode=arch=compute_{number},code=compute_{number}"));
    }
    Ok(arguments)
}

/// The first function that spills registers to memory, by the report of ptxas.
pub(crate) fn spilling(said: &str) -> Option<&str> {
    let mut function = "";
    said.lines().find_map(|line| {
        if let Some((_, name)) = line.split_once("Function properties for ") {
            function = name;
        }
        let spills = line.contains("bytes spill stores")
            && !line.contains(" 0 bytes spill stores, 0 bytes spill loads");
        spills.then_some(function)
    })
}
